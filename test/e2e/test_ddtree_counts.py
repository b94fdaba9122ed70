"""What is counted for a request ends where the request ends, as with plain decoding."""

import unittest

from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.test.ci.ci_register import register_cpu_ci
from support.cases import DDTreeCase
from support.jobs import stop_options
from support.processes import run_engine
from support.prompts import PROMPTS

register_cpu_ci(est_time=40, suite="e2e")

LENGTH = 24
WITH_TOKENIZER = {"skip_tokenizer_init": False}  # stop strings need it


def count_reasoning(engine, start_ids):
    """Answer one prompt under many stops. It reasons up to the eighth token of its free answer.

    Args:
        engine: of either kind.
        start_ids: the tag with which the model opens its reasoning. None: the prompt has opened it.

    Returns:
        For each answer: its length, its reasoning tokens and its prompt tokens.
    """
    common = dict(temperature=0, max_new_tokens=LENGTH)
    (free,) = engine.generate([PROMPTS[1]], ignore_eos=True, **common)
    output = list(free.output_ids[:LENGTH])
    config = engine.scheduler.model_config
    config.think_end_ids = output[5:8]
    config.self_opened_think_start_ids = None if start_ids is None else output[: len(start_ids)]
    requests = [engine.submit(PROMPTS[1], **common | options) for options in stop_options(output)]
    for request in requests:
        request.require_reasoning = start_ids is None
    engine.finish(requests)
    return [
        (len(request.output_ids_through_stop), request.reasoning_tokens, len(request.origin_input_ids))
        for request in requests
    ]


def accept_lengths(engine):
    """Answer two prompts in fewer steps than a log interval has, then in more.

    Returns:
        After each: /server_info's accept length, and the one that the requests' own numbers give.
    """
    found, steps, drafts = [], 0, 0
    for length in (8, 150):
        requests = engine.generate(PROMPTS[:2], temperature=0, max_new_tokens=length, ignore_eos=True)
        steps += sum(request.spec_verify_ct for request in requests)
        drafts += sum(request.spec_num_correct_drafts for request in requests)
        state = engine.scheduler.get_internal_state(GetInternalStateReq()).internal_state
        found.append((state.get("avg_spec_accept_length"), (drafts + steps) / steps))
    return found


class TestAcceptLength(DDTreeCase):
    def test_server_info_has_every_step(self):
        for reported, counted in run_engine(self.tree, accept_lengths):
            self.assertAlmostEqual(reported, counted, places=6)


class TestReasoningTokens(DDTreeCase):
    def check(self, start_ids):
        expected = run_engine(self.plain | WITH_TOKENIZER, count_reasoning, start_ids)
        self.assertEqual(run_engine(self.tree | WITH_TOKENIZER, count_reasoning, start_ids), expected)
        self.assertGreater(len({reasoning for _, reasoning, _ in expected}), 5)

    def test_opened_by_the_prompt(self):
        self.check(None)

    def test_opened_by_the_model(self):
        self.check([0, 0, 0])


if __name__ == "__main__":
    unittest.main()
