"""No false report on full captures of tiny models of the real model classes, alt streams on; a real one without guard."""

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

register_cuda_ci(est_time=90, suite="gpu")

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 10240,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
MODELS = {
    # A head size that the fused norm lacks: q and k are normalized on two streams.
    "qwen3": {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 96},
    "llama": {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 96,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **COMMON,
        **MLA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **COMMON,
        **MLA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 256,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
}
FLAGS = (
    "--load-format dummy --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.2 "
    "--max-total-tokens 4096 --max-running-requests 8 --batch-size 4 --input-len 6 --output-len 8"
).split()
EXTRA = {
    # One of them also captures its prefill, through the breakable backend.
    "llama": ["--cuda-graph-max-bs-prefill", "32"],
    # The fused store of keys needs a head size that the fused norm has.
    "qwen3_moe": ["--kv-cache-dtype", "fp8_e4m3"],
}
SECONDS = int(os.environ.get("GRAPH_GUARD_MODEL_SECONDS", "240"))


def serve_one_batch():
    """Load a model, capture its graphs, prefill and decode a batch: upstream's one_batch without a tokenizer."""
    from sglang.benchmark import one_batch

    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch.cli_main()


class Run:
    def __init__(self, name, folder, guard=True):
        self.name = name + ("" if guard else "_unguarded")
        self.report = folder / f"{self.name}.races.json"
        self.log = folder / f"{self.name}.log"
        model = folder / self.name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODELS[name]))
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
        """Silent on this tree for every model; the unguarded DeepSeek shows its routed experts' write in place."""
        keep = os.environ.get("GRAPH_GUARD_LOGS")
        folder = Path(keep) if keep else Path(self.enterContext(tempfile.TemporaryDirectory()))
        names = os.environ.get("GRAPH_GUARD_MODELS", " ".join(MODELS)).split()
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
        serve_one_batch()
    else:
        unittest.main()
