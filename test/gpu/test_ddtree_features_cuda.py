"""DDTREE on a CUDA device: the checks of test/e2e in bfloat16, with graphs and overlap scheduling.

bfloat16 rounds logits, so greedy tokens are judged by their gap to the first choice (see support.answers).
"""

import multiprocessing
import queue
import unittest
from pathlib import Path

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase
from support.answers import TIE
from support.cases import DDTreeCase
from support.cuda import CUDA
from support.jobs import exhaust_grammar, fill_context, sample, stop_everywhere
from support.penalties import PENALTIES, PenaltyChecks, penalize, stop_tokens
from support.processes import EngineProcess, run_engine
from support.prompts import LONG_PROMPTS, PROMPTS, TOKENS
from support.sampling import SamplingChecks
from support.server import ServerChecks

register_cuda_ci(est_time=420, suite="gpu")


class OnCuda(DDTreeCase):
    """Engines on CUDA. All weights are bfloat16 numbers, so a definition in float32 is of the same model."""

    @classmethod
    def setUpClass(cls):
        from safetensors.torch import load_file, save_file

        super().setUpClass()
        file = Path(cls.target) / "model.safetensors"
        weights = {name: weight.bfloat16().float() for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        cls.plain |= CUDA
        cls.tree |= CUDA


class TestPenaltiesCuda(PenaltyChecks, OnCuda):
    def assert_by_definition(self, outputs):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)

        def gaps(prompt, output, options):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
            rows = [penalize(row, output[:i], options) for i, row in enumerate(logits[: len(output)])]
            return [float(row.max() - row[token]) for row, token in zip(rows, output)]

        for prompt, options, output in zip(PROMPTS, PENALTIES, outputs):
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
            if options:  # without penalties the answer is far from the definition, so the check can fail
                self.assertGreater(max(gaps(prompt, output, {})), 3 * TIE)
            self.assertTrue(len(output) == TOKENS or output[-1] in stop_tokens(options), output)


def sample_on_demand(engine, questions, answers):
    """Answer each of the questions, arguments of sample(), until None comes."""
    for question in iter(questions.get, None):
        answers.put(sample(engine, *question))


class TestSamplingCuda(SamplingChecks, OnCuda):
    """One engine samples for all tests, because an engine takes half a minute to start.

    top-p, top-k and min-p differ from the CPU's tests, so that rounding rarely decides what they cut off. With the
    CPU's values, likely tokens are within 0.012 (in the logit) of the bounds.
    """

    # Rounding moves unlikely tokens past a bound. Plain decoding in bfloat16 on a CPU: 14 of 1,200 answers.
    outside = 0.03

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        spawn = multiprocessing.get_context("spawn")
        cls.questions, cls.answers = spawn.Queue(), spawn.Queue()
        arguments = cls.tree | {"speculative_num_draft_tokens": 24, "skip_tokenizer_init": False}
        cls.engine = EngineProcess(arguments, sample_on_demand, cls.questions, cls.answers)

    @classmethod
    def tearDownClass(cls):
        cls.questions.put(None)
        cls.engine.result(60)
        super().tearDownClass()

    def ask(self, *question):
        """The answers to sample()."""
        self.questions.put(question)
        while not self.engine.has_ended():
            try:
                return self.answers.get(timeout=1)
            except queue.Empty:
                pass
        self.fail(self.engine.result())

    def check(self, **options):
        answers = self.ask(self.prompt, self.count, options)
        self.assertLess(self.statistic(answers, self.exact(**options)), 1.0)

    def test_top_p(self):
        self.check(temperature=1.5, top_p=0.73)

    def test_top_k(self):
        self.check(temperature=1.5, top_k=6)

    def test_min_p(self):
        self.check(temperature=1.5, min_p=0.25)


class TestStopsCuda(OnCuda):
    def on_tree(self, job, **arguments):
        """The job's result on DDTREE, and the KV slots that it has leaked."""
        tree = self.tree | dict(speculative_num_draft_tokens=32, skip_tokenizer_init=False) | arguments
        return run_engine(tree, with_leaked_slots, job)

    def test_stops_inside_a_path(self):
        plain, _ = run_engine(
            self.plain | dict(skip_tokenizer_init=False, disable_overlap_schedule=True), stop_everywhere
        )
        (tree, inside), leaked = self.on_tree(stop_everywhere)
        diverged = 0
        for (options, tokens, reason), (same, plain_tokens, plain_reason) in zip(tree, plain, strict=True):
            self.assertEqual(options, same)
            # A near-tie makes two answers differ at some token. A wrong stop makes one a prefix of the other.
            if all(a == b for a, b in zip(tokens, plain_tokens)):
                self.assertEqual((tokens, reason), (plain_tokens, plain_reason), options)
            else:
                diverged += 1
        # All answers are to one prompt, so one near-tie makes all longer answers diverge.
        self.assertLess(diverged, len(tree) // 2)
        self.assertGreater(inside, 10, "few answers stopped inside their last path")
        self.assertEqual(leaked, 0)

    def test_grammar_that_allows_no_token(self):
        answers, leaked = self.on_tree(exhaust_grammar, grammar_backend="xgrammar")
        self.assertEqual([reason for _, reason in answers], ["abort", "abort", "length"])
        self.assertEqual(leaked, 0)


def with_leaked_slots(engine, job):
    """What the job returns, and the KV slots that it has not given back."""
    before = engine.free_slots()
    result = job(engine)
    return result, before - engine.free_slots()


def fill_context_and_judge(engine, prompts, answers):
    """fill_context() of plain decoding, and the gaps of each engine's answers."""
    return *fill_context(engine, prompts), [engine.gaps(prompts, outputs) for outputs in answers]


class TestContextEndCuda(OnCuda):
    prompts = LONG_PROMPTS

    def test_context_ends(self):
        modes = ("native", "triton")
        tree = self.tree | {"speculative_num_draft_tokens": 32}
        engines = [
            EngineProcess(tree | {"speculative_ddtree_verify": mode}, fill_context, self.prompts)
            for mode in modes
        ]
        answers = [engine.result() for engine in engines]
        # The last tokens are not judged: a prompt that fills the whole context is refused.
        shorter = [[output[:-8] for output in outputs] for outputs, _ in answers]
        plain, _, judged = run_engine(self.plain, fill_context_and_judge, self.prompts, shorter)
        for mode, (outputs, leaked), gaps in zip(modes, answers, judged):
            with self.subTest(mode):
                print(mode, "largest gaps", [max(found) for found in gaps])
                self.assertEqual([len(output) for output in outputs], [len(output) for output in plain])
                self.assertEqual(leaked, 0, "KV slots leaked")
                self.assertLess(max(max(found) for found in gaps), 2 * TIE)


class TestLongContextCuda(TestContextEndCuda):
    """Prompts of nearly 33,000 tokens, in chunks, with upstream's choice of the prefill backend."""

    context = 33_000
    prompts = [PROMPTS[4] * 346, PROMPTS[3] * 507]  # 32,870 and 32,955 tokens

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        more = dict(attention_backend=None, max_total_tokens=4 * cls.context)
        cls.plain |= more
        cls.tree |= more


class TestServerCuda(ServerChecks, CustomTestCase):
    """Without the radix cache every request runs the same shapes, so equal tokens are a fair test in bfloat16."""

    device = "cuda"
    flags = (
        "--dtype", "bfloat16", "--disable-radix-cache", "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--cuda-graph-max-bs-decode", "8", "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.5",
    )  # fmt: skip


if __name__ == "__main__":
    unittest.main(verbosity=2)
