"""Race reports on full captures of tiny models, with the real model classes and their side streams.

With the guard on there must be no report. With the guard off DeepSeek-V3 must show its known race and nothing else.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci
from support.model_configs import MODELS, run_one_batch, write_config

register_cuda_ci(est_time=90, suite="gpu")

FLAGS = (
    "--load-format dummy --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.2 "
    "--max-total-tokens 4096 --max-running-requests 8 --batch-size 4 --input-len 6 --output-len 8"
).split()
EXTRA = {
    # This one also captures its prefill, through the breakable backend.
    "llama": ["--cuda-graph-max-bs-prefill", "32"],
    # The fused store of keys does not support head size 96. An fp8 cache avoids it.
    "qwen3_moe": ["--kv-cache-dtype", "fp8_e4m3"],
}
FAMILIES = [name for name in MODELS if name != "deepseek_v4"]  # this one: test_graph_guard_deepseek_v4.py
SECONDS = int(os.environ.get("GRAPH_GUARD_MODEL_SECONDS", "240"))


class Run:
    """One model in its own process, with the race detector on."""

    def __init__(self, name, folder, guard=True):
        self.name = name + ("" if guard else "_unguarded")
        self.report = folder / f"{self.name}.races.json"
        self.log = folder / f"{self.name}.log"
        model = folder / self.name
        model.mkdir()
        write_config(name, model)
        prefill = [] if name == "llama" else ["--cuda-graph-backend-prefill", "disabled"]
        command = [sys.executable, __file__, "--one-batch", "--model-path", str(model)]
        command += [*FLAGS, *prefill, *EXTRA.get(name, []), "--debug-graph-races", str(self.report)]
        environment = {**os.environ, "SGLANG_GRAPH_GUARD": str(int(guard))}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def wait(self, seconds):
        try:
            return self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return "timeout"

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ModelsTest(unittest.TestCase):
    def test_reports(self):
        """No report for any model with the guard. Without it, the routed experts of DeepSeek write in place."""
        keep = os.environ.get("GRAPH_GUARD_LOGS")
        folder = Path(keep) if keep else Path(self.enterContext(tempfile.TemporaryDirectory()))
        names = os.environ.get("GRAPH_GUARD_MODELS", " ".join(FAMILIES)).split()
        runs = [Run(name, folder) for name in names] + [Run("deepseek_v3", folder, guard=False)]
        for run in runs:
            self.addCleanup(run.stop)
        until = time.monotonic() + SECONDS
        for run in runs:
            with self.subTest(model=run.name):
                code = run.wait(until - time.monotonic())
                log = run.log.read_text()
                self.assertEqual(code, 0, log[-3000:])
                self.assertIn("Decode", log)
                report = json.loads(run.report.read_text())
                print(run.name, {k: report[k] for k in ("operations", "streams", "races")}, flush=True)
                self.assertGreaterEqual(len(report["captures"]), 3)
                self.assertGreater(report["operations"], 100)
                self.assertEqual(report["undeclared_aliases"], [])
                if run.name != "llama":
                    self.assertGreaterEqual(report["streams"], 2)
                if run.name == "deepseek_v3_unguarded":
                    pairs = {(r["first"]["operation"], r["kind"]) for r in report["distinct"]}
                    self.assertEqual(pairs, {("sglang.inplace_fused_experts.default", "live-conflict")})
                else:
                    self.assertEqual(report["distinct"], [])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one-batch"]:
        del sys.argv[1]
        run_one_batch()
    else:
        unittest.main()
