"""DDTREE with the storage of the hierarchical cache. Torch copies to and from the host instead of CUDA kernels."""

import json
import tempfile
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from support.cases import DDTreeCase
from support.processes import run_engine
from support.prompts import TOKENS
from support.storage import (
    HOST,
    PROMPTS,
    STORAGE,
    STORED_FILES,
    WHOLE_PAGES,
    OnCpu,
    ask_storage,
    fill_storage,
)

register_cpu_ci(est_time=45, suite="e2e")


class TestStorage(DDTreeCase):
    def test_kv_comes_back_from_files(self):
        """The second server has nothing but the files of the first."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        arguments = (HOST | STORAGE) | dict(
            hicache_storage_backend_extra_config=json.dumps({"file_storage_path": folder}),
            hicache_mem_layout="layer_first",
            hicache_io_backend="direct",
            speculative_num_draft_tokens=32,
        )
        tree = self.tree | arguments
        first = run_engine(tree, OnCpu(fill_storage), folder)
        names = [file.name for file in Path(folder).glob("*.bin")]
        self.assertGreaterEqual(len(names), STORED_FILES)
        found, cached, second = run_engine(tree, OnCpu(ask_storage), folder)
        self.assertEqual(cached, [WHOLE_PAGES] * len(PROMPTS))
        self.assertEqual(second, first, "(target, drafter) of each prompt")
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertEqual(found.outputs, run_engine(self.plain, Greedily()).outputs)
        self.assertGreater(found.accepted, 25)

        for file in Path(folder).glob("*draft*.bin"):
            file.unlink()
        _, cached, _ = run_engine(tree, OnCpu(ask_without_waiting), folder)
        self.assertEqual(cached, [0] * len(PROMPTS), "the target's pages are useless without the drafter's")


class Greedily:
    """A job: greedy answers to PROMPTS."""

    def __call__(self, engine):
        return engine.greedy(PROMPTS, TOKENS)


def ask_without_waiting(engine, folder):
    return ask_storage(engine, folder, seconds=0)


if __name__ == "__main__":
    unittest.main()
