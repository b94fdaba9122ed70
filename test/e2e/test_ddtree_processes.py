"""Each process that upstream starts for a server knows DDTREE."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import psutil
import requests
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, popen_launch_server
from support.models import write_models

register_cpu_ci(est_time=220, suite="e2e")

PORT = int(os.environ.get("SGLANG_TEST_PORT", "21090")) + 17
URL = f"http://127.0.0.1:{PORT}"
PROMPT = [3, 10, 7, 12, 5, 9]
FLAGS = ["--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "8", "--mem-fraction-static", "0.1"]  # fmt: skip
ENGINE = """
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path="{target}", speculative_algorithm="DDTREE", speculative_draft_model_path="{drafter}", device="cpu",
        dtype="float32", max_total_tokens=2048, max_running_requests=8, mem_fraction_static=0.1, log_level="error",
    )
    answer = engine.generate(input_ids=[3, 10, 7], sampling_params=dict(max_new_tokens=20, ignore_eos=True))
    print("steps", answer["meta_info"]["spec_verify_ct"])
    engine.shutdown()
"""


def report_algorithm(arguments, role, pipe):
    """What a process of upstream's does first with the server's arguments, in one that has loaded no plug-ins."""
    from sglang.srt.runtime_context import get_spec, publish
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    publish(arguments, role=role)
    pipe.send(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm).name)


class TestProcesses(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        # Upstream splits a vocabulary at multiples of 64, and each of two ranks must have tokens to draft from.
        cls.target, cls.drafter = write_models(Path(folder.name), vocabulary=128)

    def serve(self, *flags, processes):
        """Start a server, wait for `processes` (numbers by name), and ask it a few times."""
        environment = {
            **os.environ,
            "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # upstream must be told the cores of two ranks on one NUMA node
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120",  # a worker's imports take longer than the default
        }
        server = popen_launch_server(
            self.target, URL, timeout=400, device="cpu", env=environment,
            other_args=["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", self.drafter, *FLAGS, *flags],
        )  # fmt: skip
        self.addCleanup(kill_process_tree, server.pid)
        # The server answers as soon as one of its workers does.
        deadline = time.monotonic() + 200
        while (found := self.running(server, processes)) != processes and time.monotonic() < deadline:
            time.sleep(1)
        self.assertEqual(found, processes)
        sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
        for _ in range(8):  # enough for each of two workers to get some
            body = {"input_ids": PROMPT, "sampling_params": sampling}
            answer = requests.post(f"{URL}/generate", json=body, timeout=120)
            self.assertEqual(answer.status_code, 200, answer.text)
            self.assertGreater(answer.json()["meta_info"]["spec_verify_ct"], 0)

    def running(self, server, names):
        lines = [" ".join(child.cmdline()) for child in psutil.Process(server.pid).children(recursive=True)]
        return {name: sum(name in line for line in lines) for name in names}

    def test_tokenizer_and_detokenizer_workers(self):
        self.serve(
            "--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2",
            processes={"sglang::tokenizer_worker": 2, "sglang::detokenizer": 3},  # with the detokenizers' router
        )  # fmt: skip

    def test_data_parallel_controller(self):
        self.serve(
            "--dp-size", "2", processes={"sglang::scheduler": 2, "sglang::data_parallel_controller": 1}
        )

    def test_tensor_parallel(self):
        self.serve("--tp-size", "2", processes={"sglang::scheduler": 2})

    def test_engine_in_process(self):
        # Python imports from a script's folder first, so it must hold nothing else.
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "engine.py"
            script.write_text(ENGINE.format(target=self.target, drafter=self.drafter))
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        self.assertRegex(done.stdout, r"steps [1-9]", done.stderr[-2000:])

    def test_a_process_that_loads_no_plugins(self):
        """The encoder's and, where Ray is installed, its actors': they start with what this one starts with."""
        arguments = ServerArgs(
            model_path=self.target,
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=self.drafter,
            device="cpu",
        )
        load_plugins()
        arguments.resolve_once()
        spawn = multiprocessing.get_context("spawn")
        for role in ("encoder", "scheduler"):
            with self.subTest(role=role):
                ours, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=report_algorithm, args=(arguments, role, theirs))
                process.start()
                theirs.close()
                self.assertEqual(ours.recv(), "DDTREE")
                process.join()


if __name__ == "__main__":
    unittest.main()
