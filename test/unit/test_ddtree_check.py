"""The verdict on a target and a drafter from their configurations, and the command that prints it."""

import contextlib
import io
import json
import unittest
from pathlib import Path

from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.ddtree import check as command
from sglang.srt.speculative.ddtree.checkpoint import INDEX, weight_bytes
from sglang.srt.speculative.ddtree.verdict import check
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import DRAFTER, MODEL, ArgumentsCase
from support.hub import FakeHub
from support.published import SERVER, write_pair

register_cpu_ci(est_time=30, suite="unit")

CPU = ["--attention-backend", "torch_native", "--dtype", "float32"]


class CheckCase(ArgumentsCase):
    def pair(self, family, kind="plain"):
        """A target as a published one, and a drafter of a kind for it."""
        return write_pair(self.model.parent / f"{family}-{kind}", family, kind)

    def served(self, target, drafter, *arguments):
        """The choices, by their first word or words."""
        verdict = check(str(target), str(drafter), list(arguments))
        self.assertEqual(verdict.refusals, [])
        return dict(line.split(": ", 1) for line in verdict.choices)

    def refused(self, text, target, drafter, *arguments):
        verdict = check(str(target), str(drafter), list(arguments))
        self.assertEqual(verdict.choices, [])
        self.assertEqual(len(verdict.refusals), 1, verdict.refusals)
        self.assertIn(text, verdict.refusals[0])


class TestServed(CheckCase):
    def test_widths_and_kernels_on_a_cpu(self):
        found = self.served(self.model, self.drafter, *CPU, "--speculative-eagle-topk", "4")
        self.assertIn("N = 32 nodes, F = 8 positions per draft pass, K = 4 candidates", found["widths"])
        self.assertEqual(found["prefill"], "torch_native")
        for name in ("verify", "drafter"):
            self.assertEqual(found[name], "the tree ops around torch_native")
        self.assertNotIn("note", found)

    def test_widths_of_a_budget(self):
        auto = ("--speculative-ddtree-budget", "auto")
        found = self.served(self.model, self.drafter, *CPU, *auto)
        self.assertIn("N = 1, 4, 8, 16, 24, 32, 48, 64 nodes, as each step chooses, F = 8", found["widths"])
        found = self.served(*self.pair("Gemma 4"), *SERVER, *auto)
        self.assertIn("N = 64 nodes, F = ", found["widths"])

    def test_kernels_on_cuda(self):
        for family, prefill, verify in (
            ("Qwen3", "fa3", "the tree ops around triton"),
            ("Kimi-K2.5", "fa3", "the tree ops around triton"),
            ("MiniMax-M2", "fa3", "the tree ops around triton"),  # hidden states for EAGLE3 only
            ("Gemma 4", None, "triton, because the tree ops do not cover attention of (h_q, h_kv, d_qk, d_v) = (32, 16, 512, 512)"),
        ):  # fmt: skip
            with self.subTest(family):
                found = self.served(*self.pair(family), *SERVER)
                self.assertIn(prefill, (found["prefill"], None))
                self.assertEqual(found["verify"], verify)
                self.assertIn("note", found)

    def test_a_drafter_on_triton(self):
        target, drafter = self.pair("Qwen3")
        file = Path(drafter, "config.json")
        windows = dict(
            layer_types=["sliding_attention"] * 4, sliding_window=64, use_sliding_window=True, is_causal=False
        )
        file.write_text(json.dumps(json.loads(file.read_text()) | windows))
        found = self.served(target, drafter, *SERVER)
        self.assertEqual(
            found["drafter"],
            "triton, because the tree ops do not cover sliding windows in a draft block that is not causal",
        )
        self.refused(
            "--speculative-draft-window-size: expected a drafter that the tree ops cover, got sliding windows",
            target, drafter, *SERVER, "--speculative-draft-window-size", "512",
        )  # fmt: skip

    def test_memory(self):
        (self.drafter / "model.safetensors").write_bytes(bytes(3_000_000))
        found = self.served(self.model, self.drafter, *CPU)
        self.assertEqual(found["weights of all ranks"], "target unknown, drafter 0.003 GB")
        layers, heads, size = (MODEL[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        token = layers * heads * 2 * size * 4  # float32
        self.assertEqual(
            found["KV per rank"], f"target {token} bytes per token, drafter {token} bytes per token"
        )
        logits = 48 * 32 * MODEL["vocab_size"] * (4 + 2) / (1 << 20)  # of 48 requests with 32 nodes
        self.assertEqual(
            found["memory of a verify"], f"{logits / 1e3:.3f} GB of logits and activations for 48 requests"
        )

    def test_memory_of_other_layers(self):
        for family, arguments, expected in (
            ("gpt-oss", [], "target 4096 bytes per token, target 4096 bytes per token in windows, drafter"),
            (
                "Kimi-K2.5",
                ["--tp-size", "8"],
                "target 4608 bytes per token, drafter",
            ),  # latent rows are not split
            ("Qwen3", ["--tp-size", "2"], "target 8192 bytes per token, drafter 8192"),
            ("Qwen3", ["--kv-cache-dtype", "fp8_e4m3"], "target 8192 bytes per token, drafter 8192"),
            ("Qwen3.5", [], "target 4096 bytes per token"),  # one layer of four has KV
        ):
            with self.subTest(family, arguments=arguments):
                folder = self.model.parent / "-".join([family, *arguments])
                found = self.served(*write_pair(folder, family, "plain"), *SERVER, *arguments)
                self.assertIn(expected, found["KV per rank"])

    def test_recurrent_states(self):
        found = self.served(*self.pair("Qwen3.5"), *SERVER)
        state = 3 * 32 * 128 * 128 * 4  # layers, heads, d_k, d_v, float32
        window = 3 * (2 * 16 + 32) * 128 * 3 * 2  # layers, channels, tokens, bfloat16
        self.assertEqual(found["recurrent states per rank"], f"{(state + window) / 1e6:.1f} MB per request")


class TestRefused(CheckCase):
    def test_all_faults_of_a_drafter(self):
        (self.drafter / "config.json").write_text(
            json.dumps(DRAFTER | dict(hidden_size=256, vocab_size=5000))
        )
        verdict = check(str(self.model), str(self.drafter), CPU)
        self.assertEqual(
            [line.split("config.json: ")[1].split(":")[0] for line in verdict.refusals],
            ["hidden_size", "vocab_size"],
        )

    def test_an_argument(self):
        self.refused("--pp-size: expected 1, got 2", self.model, self.drafter, *CPU, "--pp-size", "2")

    def test_nothing_there(self):
        self.refused("--model-path: expected a folder with a model", self.model / "none", self.drafter)
        self.refused(
            "--speculative-draft-model-path: expected a folder", self.model, self.drafter / "none", *CPU
        )

    def test_configurations_that_cannot_be_read(self):
        for text in ("{", '{"model_type": "martian", "architectures": ["Martian"]}'):
            (self.model / "config.json").write_text(text)
            self.refused("SGLang refuses it with ", self.model, self.drafter, *CPU)

    def test_the_hub_is_asked_once(self):
        hub = FakeHub(self)
        for name, text in (
            ("gated", "is gated: accept its terms"),
            ("missing", "is neither a folder nor on the hub"),
        ):
            self.refused(f"the hub, got owner/{name}, which {text}", f"owner/{name}", self.drafter)
            self.assertEqual(hub.asked, [f"/owner/{name}/resolve/main/config.json"])
            hub.asked.clear()
        self.refused(
            "which has no revision 'v9' (--revision)", "owner/revision", self.drafter, "--revision", "v9"
        )

    def test_targets(self):
        for family, text in (
            ("MiniMax-M3", "got the indexer of MiniMax's sparse attention"),
            ("GLM-5", "got the indexer of DeepSeek's sparse attention (DSA)"),
            ("DeepSeek-V4", "got DeepSeek-V4's compressed attention"),
        ):
            with self.subTest(family):
                self.refused(text, *self.pair(family), *SERVER)

    def test_a_target_that_offers_no_hidden_states(self):
        target, drafter = self.pair("Qwen3")
        file = Path(target, "config.json")
        file.write_text(
            json.dumps(json.loads(file.read_text()) | dict(architectures=["StableLmForCausalLM"]))
        )
        self.refused(
            "a model with set_dflash_layers_to_capture(), which gives a drafter its hidden states, got StableLmForCausalLM",
            target,
            drafter,
            *SERVER,
        )

    def test_a_target_that_torch_does_not_prefill(self):
        dummy = ["--speculative-draft-load-format", "dummy"]
        self.refused("expected a backend that supports MLA, such as", *self.pair("Kimi-K2.5"), *CPU, *dummy)

    def test_recurrent_layers_that_no_kernel_covers(self):
        target, drafter = self.pair("Qwen3.5")
        file = Path(target, "config.json")
        config = json.loads(file.read_text())
        config["text_config"]["linear_key_head_dim"] = 96
        file.write_text(json.dumps(config))
        self.refused("got recurrent layers with (d_k, d_v) = (96, 128)", target, drafter, *SERVER)

    def test_a_server_refuses_a_sparse_target_by_its_configuration(self):
        target, drafter = self.pair("MiniMax-M3")
        with self.assertRaisesRegex(ValueError, "^DDTREE: --model-path: .* got the indexer of MiniMax's"):
            self.resolve(
                model_path=target, speculative_draft_model_path=drafter, speculative_draft_load_format="dummy"
            )


class TestCommand(CheckCase):
    def run_command(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command.main([str(argument) for argument in arguments])
        return status, out.getvalue(), err.getvalue()

    def test_exit_status(self):
        status, out, _ = self.run_command(self.model, self.drafter, *CPU)
        self.assertEqual(status, 0)
        self.assertTrue(
            out.startswith(f"DDTREE serves {self.model} with {self.drafter}.\n  widths: N = 32"), out
        )
        status, out, _ = self.run_command(self.model, self.model, *CPU)
        self.assertEqual(status, 1)
        self.assertRegex(out, "^DDTREE does not serve .*:\n  DDTREE: .* got the target itself")
        for arguments in ((), (self.model,), ("--device", "cuda")):
            status, out, err = self.run_command(*arguments)
            self.assertEqual((status, out, err), (2, "", command.USAGE + "\n"))
        status, out, err = self.run_command("--help")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("The exit status is 0", out)


class TestFlag(CheckCase):
    """launch_server --check-drafter."""

    def launch(self, *arguments):
        """The exit status of launch_server, and what it prints."""
        given = ["--model-path", self.model, "--check-drafter", "--skip-tokenizer-init", *CPU, *arguments]
        args, out = prepare_server_args([str(argument) for argument in given]), io.StringIO()
        with contextlib.redirect_stdout(out), self.assertRaises(SystemExit) as caught:
            args.resolve_once()
        return caught.exception.code, out.getvalue()

    def test_it_answers_as_the_module(self):
        status, out = self.launch("--speculative-draft-model-path", self.drafter)
        self.assertEqual(status, 0)
        verdict = check(str(self.model), str(self.drafter), CPU)
        self.assertEqual(out.splitlines()[0], f"DDTREE serves {self.model} with {self.drafter}.")
        self.assertEqual(out.splitlines()[1:], [f"  {line}" for line in verdict.choices])

    def test_refusals(self):
        status, out = self.launch("--speculative-draft-model-path", self.drafter / "none")
        self.assertEqual(status, 1)
        self.assertIn("--speculative-draft-model-path: expected a folder", out)
        status, out = self.launch("--speculative-algorithm", "DDTREE")
        self.assertEqual(status, 1)
        self.assertIn("expected the path of a DFlash drafter, got none", out)


class TestWeightBytes(CheckCase):
    def test_folders(self):
        self.assertIsNone(weight_bytes(str(self.model), None))  # its file is empty
        (self.model / "a.safetensors").write_bytes(bytes(70))
        (self.model / "b.safetensors").write_bytes(bytes(30))
        self.assertEqual(weight_bytes(str(self.model), None), 100)
        (self.model / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=12345))))
        self.assertEqual(weight_bytes(str(self.model), None), 12345)

    def test_a_file_on_the_hub(self):
        FakeHub(self)
        self.assertEqual(weight_bytes("owner/there", None), FakeHub.SIZE)

    def test_a_hub_that_cannot_be_asked(self):
        FakeHub(self)
        self.assertIsNone(weight_bytes("owner/broken", None))


if __name__ == "__main__":
    unittest.main()
