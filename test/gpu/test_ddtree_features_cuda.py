"""DDTREE on a CUDA device: what test/e2e checks on a CPU, there in bfloat16, with graphs and overlap scheduling.

bfloat16 rounds logits, so greedy tokens are judged by how far they are from the first choice, as in test_ddtree_cuda.py.
"""

import sys
import unittest
from pathlib import Path

import torch
from sglang.test.ci.ci_register import register_cuda_ci

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
import test_ddtree_lossless as lossless  # noqa: E402  a module: the names of its test classes must not appear here
import test_ddtree_server as server  # noqa: E402
from ddtree_host import Child, in_child  # noqa: E402
from test_ddtree_cuda import CUDA, TIE  # noqa: E402

register_cuda_ci(est_time=420, suite="gpu")


class OnCuda(lossless.DDTreeCase):
    """Servers on CUDA; the target's weights are bfloat16 numbers, so that definitions in float32 are of the same model."""

    @classmethod
    def setUpClass(cls):
        from safetensors.torch import load_file, save_file

        super().setUpClass()
        file = Path(cls.target) / "model.safetensors"
        weights = {name: weight.bfloat16().float() for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        cls.plain |= CUDA
        cls.tree |= CUDA


class TestPenaltiesCuda(lossless.TestPenalties, OnCuda):
    def assert_by_definition(self, outputs):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)

        def gaps(prompt, output, options):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
            rows = [
                lossless.penalize(row, output[:i], options) for i, row in enumerate(logits[: len(output)])
            ]
            return [float(row.max() - row[token]) for row, token in zip(rows, output)]

        for prompt, options, output in zip(lossless.PROMPTS, lossless.PENALTIES, outputs):
            found = gaps(prompt, output, options)
            print(
                options,
                "largest gaps",
                sorted(found, reverse=True)[:3],
                "ties",
                sum(gap > 0 for gap in found),
            )
            self.assertLess(max(found), 2 * TIE)
            self.assertLess(sum(gap > 0 for gap in found), len(found) // 8)
            if options:  # else the check could not fail
                self.assertGreater(max(gaps(prompt, output, {})), 3 * TIE)
            stops = [1, *options.get("stop_token_ids", ())] if "min_new_tokens" in options else []
            self.assertTrue(len(output) == lossless.TOKENS or output[-1] in stops, output)


class TestSamplingCuda(lossless.TestSampling, OnCuda):
    """The bounds of top-p, top-k and min-p lie where bfloat16 hardly decides.

    With the values of the CPU's tests likely tokens are 0.012 in the logit from them, and which are cut off is rounding.
    """

    # Rounding moves unlikely tokens past a bound: of 1,200 answers plain decoding in bfloat16 on a CPU has 14 such.
    outside = 0.03

    def test_top_p(self):
        self.check(temperature=1.5, top_p=0.73)

    def test_top_k(self):
        self.check(temperature=1.5, top_k=6)

    def test_min_p(self):
        self.check(temperature=1.5, min_p=0.25)


class TestStopsCuda(OnCuda):
    """The jobs of the CPU's tests, with graphs and overlap scheduling."""

    def on_tree(self, job, **arguments):
        tree = self.tree | dict(speculative_num_draft_tokens=32, skip_tokenizer_init=False) | arguments
        return in_child(tree, without_leak, job)

    def test_stops_inside_a_path(self):
        plain, _ = in_child(
            self.plain | dict(skip_tokenizer_init=False, disable_overlap_schedule=True), lossless.stops
        )
        (ways, inside), leaked = self.on_tree(lossless.stops)
        others = (
            0  # answers that a near-tie has led elsewhere; a wrong stop leaves one the beginning of the other
        )
        for (way, tokens, reason), (plain_way, plain_tokens, plain_reason) in zip(ways, plain, strict=True):
            self.assertEqual(way, plain_way)
            if all(a == b for a, b in zip(tokens, plain_tokens)):
                self.assertEqual((tokens, reason), (plain_tokens, plain_reason), way)
            else:
                others += 1
        self.assertLess(others, len(ways) // 2)  # one prompt: one near-tie leads all longer answers elsewhere
        self.assertGreater(inside, 10, "few answers stopped before their last step's last token")
        self.assertEqual(leaked, 0)

    def test_grammar_that_allows_no_token(self):
        (greedy, sampled, free), leaked = self.on_tree(lossless.impossible, grammar_backend="xgrammar")
        self.assertEqual([reason for _, reason in (greedy, sampled, free)], ["abort", "abort", "length"])
        self.assertEqual(leaked, 0)


def without_leak(host, job):
    """What the job returns, and the KV slots that it has not given back."""
    before = host.free_slots()
    result = job(host)
    return result, before - host.free_slots()


def judge_the_end(host, answers):
    """to_the_end() of plain decoding, and how far the tokens of each server's answers are from greedy."""
    return *lossless.to_the_end(host), [host.gaps(lossless.LONG, outputs) for outputs in answers]


class TestContextEndCuda(OnCuda):
    def test_context_ends(self):
        modes = ("native", "triton")
        tree = self.tree | {"speculative_num_draft_tokens": 32}
        servers = [Child(tree | {"speculative_ddtree_verify": mode}, lossless.to_the_end) for mode in modes]
        answers = [server.result() for server in servers]
        # the last tokens are left out: a prompt of the whole context is refused
        shorter = [[output[:-8] for output in outputs] for outputs, _ in answers]
        plain, _, judged = in_child(self.plain, judge_the_end, shorter)
        for mode, (outputs, leaked), gaps in zip(modes, answers, judged):
            with self.subTest(mode):
                print(mode, "largest gaps", [max(found) for found in gaps])
                self.assertEqual([len(output) for output in outputs], [len(output) for output in plain])
                self.assertEqual(leaked, 0, "KV slots leaked")
                self.assertLess(max(max(found) for found in gaps), 2 * TIE)


class TestServerCuda(server.TestDDTreeServer):
    device = "cuda"
    flags = [
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--cuda-graph-max-bs-decode", "8",
        "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.5",
    ]  # fmt: skip


if __name__ == "__main__":
    unittest.main(verbosity=2)
