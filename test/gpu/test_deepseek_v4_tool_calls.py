"""Tool calls of a tiny DeepSeek-V4 at concurrency 32: each parses, and equals that of the engine without graphs."""

import json
import os
import tempfile
import unittest
from functools import partial
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci
from support.deepseek_v4 import KEYS, REPRODUCIBLE, IndexKeysCase, start
from support.processes import run_all
from support.tool_calls import TOOL_SETS, ToolCalls, parser, tools, write_tokenizer

register_cuda_ci(est_time=300, suite="gpu")

SECONDS = int(os.environ.get("DEEPSEEK_V4_SECONDS", "400"))
REQUESTS = 2000
CONCURRENCY = 32


class TestToolCalls(IndexKeysCase):
    @classmethod
    def setUpClass(cls):
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        write_tokenizer(folder)
        starts = {}
        for keys in KEYS:
            engine = partial(
                partial, start, folder, dsv4_index_k_dtype=keys, skip_tokenizer_init=False, **REPRODUCIBLE
            )
            eager = ToolCalls(REQUESTS, CONCURRENCY, eager=True)
            starts[keys, "eager"] = engine(eager, disable_cuda_graph=True)
            # A graph for each size. Otherwise batches are padded, and cuBLAS may round larger ones in another way.
            sizes = list(range(1, CONCURRENCY + 1))
            starts[keys, "graph"] = engine(ToolCalls(REQUESTS, CONCURRENCY), cuda_graph_bs_decode=sizes)
        cls.results = dict(run_all(starts, len(starts), SECONDS))

    def test_every_call_parses(self):
        parsers = [parser(i) for i in range(TOOL_SETS)]
        required = [
            {t.function.name: set(t.function.parameters["required"]) for t in tools(i)}
            for i in range(TOOL_SETS)
        ]
        for keys in KEYS:
            with self.subTest(keys=keys):
                answers = self.of(keys, "graph")
                self.assertEqual(len(answers), REQUESTS)
                for i, (_, text) in enumerate(answers):
                    rest, calls = parsers[i % TOOL_SETS].parse_non_stream(text)
                    self.assertEqual((rest.strip(), len(calls)), ("", 1), text)
                    expected = required[i % TOOL_SETS][calls[0].name]
                    self.assertEqual(json.loads(calls[0].parameters).keys(), expected, text)

    def test_calls_equal_those_of_the_eager_engine(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                graph, eager = self.of(keys, "graph"), self.of(keys, "eager")
                different = [i for i, pair in enumerate(zip(graph, eager, strict=True)) if pair[0] != pair[1]]
                self.assertEqual(different, [])

    def test_calls_differ_from_each_other(self):
        """Otherwise the comparison above would say nothing."""
        for keys in KEYS:
            with self.subTest(keys=keys):
                texts = {answer.text for answer in self.of(keys, "eager")}
                self.assertGreater(len(texts), CONCURRENCY)


if __name__ == "__main__":
    unittest.main()
