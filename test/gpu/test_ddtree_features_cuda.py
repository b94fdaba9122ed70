"""DDTREE on a CUDA device: stops, contexts that end, LoRA, sessions, a mixed load and a server, with graphs and overlap.

bfloat16 rounds logits, so greedy tokens are judged by their gap to the first choice (see support.answers).
"""

import multiprocessing
import tempfile
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase
from support.adapters import WithAdapters, write_adapters
from support.answers import TIE, assert_first_choices
from support.cases import CudaCase
from support.engine import Greedy
from support.jobs import continue_sessions, exhaust_grammar, fill_context, stop_everywhere
from support.load import BEGINNING, retractions, schedule, serve
from support.models import text_of
from support.processes import EngineProcess, run_engine
from support.prompts import LONG_PROMPTS, PROMPTS
from support.server import ServerChecks

register_cuda_ci(est_time=460, suite="gpu")


class TestStopsCuda(CudaCase):
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


class TestContextEndCuda(CudaCase):
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


class TestAdaptersCuda(CudaCase):
    def test_lora(self):
        lora = write_adapters(self.target, Path(self.enterContext(tempfile.TemporaryDirectory())))
        found = run_engine(self.tree | lora | {"speculative_num_draft_tokens": 32}, WithAdapters())
        gaps = run_engine(self.plain | lora, WithAdapters(judged=found.outputs))
        assert_first_choices(self, "tree", found, gaps, least_accepted=20)


def judge_turns(engine, given):
    """Gaps of the answers of each kind of session, and of plain decoding's own answers to the prompts of the first.

    Args:
        engine: a plain engine.
        given: queue that gets the Turns of all kinds of sessions.
    """
    turns = given.get()
    prompts = turns[0].prompts
    own = engine.generate(prompts, temperature=0, max_new_tokens=20, ignore_eos=True)
    gaps = {str(i): engine.gaps(found.prompts, found.found.outputs) for i, found in enumerate(turns)}
    return gaps | {"plain": engine.gaps(prompts, [list(request.output_ids) for request in own])}


class TestSessionsCuda(CudaCase):
    def test_turns_go_on_after_the_stop(self):
        one_at_a_time = dict(cuda_graph_max_bs_decode=1)
        tree = (
            self.tree | one_at_a_time | dict(speculative_num_draft_tokens=32, enable_streaming_session=True)
        )
        engines = [EngineProcess(tree, continue_sessions, streaming) for streaming in (False, True)]
        given = multiprocessing.get_context("spawn").Queue()
        judge = EngineProcess(self.plain | one_at_a_time, judge_turns, given)
        self.addCleanup(judge.kill)
        turns = [engine.result() for engine in engines]
        given.put(turns)
        gaps = judge.result()
        for i, (prompts, found, inside) in enumerate(turns):
            with self.subTest(streaming=bool(i)):
                whole = zip(prompts, found.outputs, prompts[1:], strict=False)
                ended = [j for j, (a, b, c) in enumerate(whole) if (j + 1) % 4 and a + b != c[:-2]]
                self.assertEqual(ended, [], "turns whose next one goes on elsewhere")
                self.assertGreater(inside, 3, "few answers stopped inside their last path")
                assert_first_choices(self, str(i), found, gaps, least_accepted=10)


def serve_and_count(engine, planned):
    """serve(), and the number of retractions."""
    retracted = retractions(engine)
    return *serve(engine, planned), len(retracted)


def serve_and_judge(engine, planned, answers):
    """Gaps of each engine's answers to the greedy requests without a grammar, and of this engine's own."""
    own, _ = serve(engine, planned)
    places = [place for place in own if "regex" not in planned[place]["options"]]
    prompts = [planned[place]["prompt"] for place in places]
    return {
        name: engine.gaps(prompts, [outputs[place] for place in places])
        for name, outputs in (answers | {"plain": own}).items()
    }


class TestLoadCuda(CudaCase):
    """Many kinds of requests arrive over time. Some have a grammar, some are aborted, and a small pool retracts some."""

    def test_mixed_load(self):
        planned = schedule(5)
        arguments = dict(skip_tokenizer_init=False, grammar_backend="xgrammar", chunked_prefill_size=64)
        cases = {
            "small pool": dict(max_total_tokens=700),
            "mixed prefill": dict(max_total_tokens=2560, page_size=16, enable_mixed_chunk=True),
        }
        engines = {
            name: EngineProcess(self.tree | arguments | case, serve_and_count, planned)
            for name, case in cases.items()
        }
        found = {name: engine.result() for name, engine in engines.items()}
        answers = {name: outputs for name, (outputs, *_) in found.items()}
        gaps = run_engine(self.plain | arguments, serve_and_judge, planned, answers)
        for name, (outputs, slots, retracted) in found.items():
            with self.subTest(name):
                print(f"{name}: {retracted} retractions")
                assert_first_choices(self, name, Greedy([], 0, 0, slots), gaps, least_accepted=0)
                for place, output in outputs.items():
                    if "regex" in planned[place]["options"]:
                        self.assertRegex(text_of(output), f"^{BEGINNING}$")
        self.assertGreater(found["small pool"][2], 0)


class TestServerCuda(ServerChecks, CustomTestCase):
    """Without the radix cache every request runs the same shapes, so equal tokens are a fair test in bfloat16."""

    device = "cuda"
    flags = (
        "--dtype", "bfloat16", "--disable-radix-cache", "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--cuda-graph-max-bs-decode", "8", "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.5",
    )  # fmt: skip


if __name__ == "__main__":
    unittest.main(verbosity=2)
