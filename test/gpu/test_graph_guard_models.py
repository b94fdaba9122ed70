"""No false report on full captures of tiny models of the real model classes, alt streams on, served end to end."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=150, suite="gpu")

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
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
OVERLAPPED = {"qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"}  # Llama has no second stream
FLAGS = (
    "--load-format dummy --skip-tokenizer-init --attention-backend triton --sampling-backend pytorch "
    "--mem-fraction-static 0.2 --max-total-tokens 4096 --cuda-graph-max-bs-decode 4 --skip-server-warmup "
    "--max-running-requests 8"
).split()
SECONDS = int(os.environ.get("GRAPH_GUARD_MODEL_SECONDS", "150"))


class Server:
    def __init__(self, name, folder):
        self.name = name
        self.report = folder / f"{name}.races.json"
        self.log = folder / f"{name}.log"
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODELS[name]))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        # One of them also captures its prefill, through the breakable backend.
        prefill = (
            "--cuda-graph-max-bs-prefill 32" if name == "llama" else "--cuda-graph-backend-prefill disabled"
        )
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--port",
            str(self.port),
        ]
        command += [*FLAGS, *prefill.split(), "--debug-graph-races", str(self.report)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def post(self, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=body and json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read()

    def wait(self, until):
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.post("/health")
                return True
            except OSError:
                time.sleep(1)
        return False

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ModelsTest(unittest.TestCase):
    def test_no_false_report(self):
        keep = os.environ.get("GRAPH_GUARD_LOGS")
        folder = Path(keep) if keep else Path(self.enterContext(tempfile.TemporaryDirectory()))
        names = os.environ.get("GRAPH_GUARD_MODELS", " ".join(MODELS)).split()
        servers = [Server(name, folder) for name in names]
        for server in servers:
            self.addCleanup(server.stop)
        until = time.monotonic() + SECONDS
        for server in servers:
            with self.subTest(model=server.name):
                up = server.wait(until)
                self.assertTrue(up, f"{server.name} didn't start: {server.log.read_text()[-3000:]}")
                body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
                reply = json.loads(server.post("/generate", body))
                self.assertEqual(len(reply["output_ids"]), 8)
                report = json.loads(server.report.read_text())
                self.assertEqual(report["distinct"], [], server.name)
                self.assertGreaterEqual(len(report["captures"]), 3)
                self.assertGreater(report["operations"], 100)
                if server.name in OVERLAPPED:
                    self.assertGreaterEqual(report["streams"], 2)
                print(server.name, {k: report[k] for k in ("operations", "streams", "races")}, flush=True)


if __name__ == "__main__":
    unittest.main()
