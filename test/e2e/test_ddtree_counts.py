"""What is counted for a request ends where the request ends, as with plain decoding."""

import json
import os
import unittest

import requests
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, popen_launch_server
from support.cases import DDTreeCase
from support.jobs import stop_options
from support.processes import run_engine
from support.prompts import PROMPTS

from tools import demo_model
from tools.serve import DEMO_DRAFTER, QUESTION

register_cpu_ci(est_time=130, suite="e2e")

URL = f"http://127.0.0.1:{int(os.environ.get('SGLANG_TEST_PORT', '21090')) + 19}"

LENGTH = 24
WITH_TOKENIZER = {"skip_tokenizer_init": False}  # stop strings need it


def count_reasoning(engine, start_ids):
    """Answer one prompt under many stops. It reasons up to the eighth token of its free answer.

    Args:
        engine: an engine of either kind.
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


class TestUsage(CustomTestCase):
    """The demo model never closes its reasoning, so all of an answer is reasoning. Its steps have several tokens."""

    @classmethod
    def setUpClass(cls):
        server = popen_launch_server(
            str(demo_model.prepare(demo_model.default_folder())), URL, timeout=400, device="cpu",
            other_args=[
                "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(DEMO_DRAFTER),
                "--speculative-num-draft-tokens", "16", "--reasoning-parser", "deepseek-r1", "--skip-server-warmup",
                "--max-total-tokens", "4096", "--max-running-requests", "8", "--served-model-name", "m",
            ],
        )  # fmt: skip
        cls.addClassCleanup(kill_process_tree, server.pid)

    def chat(self, **further):
        body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        return requests.post(f"{URL}/v1/chat/completions", json=body | further, timeout=300)

    def test_every_length_and_answer_count(self):
        for length in range(1, 8):
            for n in (1, 3):
                with self.subTest(length=length, n=n):
                    usage = self.chat(max_tokens=length, n=n).json()["usage"]
                    self.assertEqual(usage["completion_tokens"], length * n)
                    self.assertEqual(usage["reasoning_tokens"], length * n)

    def test_streams(self):
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for n in (1, 3):
            for length in (5, 6, 7):
                with self.subTest(length=length, n=n):
                    lines = self.chat(max_tokens=length, n=n, **options).iter_lines()
                    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
                    usages = [event["usage"] for event in events if event.get("usage")]
                    for usage in usages:
                        self.assertEqual(usage["reasoning_tokens"], usage["completion_tokens"])
                    self.assertEqual(usages[-1]["completion_tokens"], length * n)

    def test_generate(self):
        for n in (1, 3):
            for stream in (False, True):
                with self.subTest(n=n, stream=stream):
                    body = {
                        "text": QUESTION,
                        "require_reasoning": True,
                        "stream": stream,
                        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "n": n},
                    }
                    answer = requests.post(f"{URL}/generate", json=body, timeout=300)
                    if stream:
                        lines = [line for line in answer.iter_lines() if line.startswith(b"data: {")]
                        answers = [json.loads(line[6:]) for line in lines]
                        answers = [one for one in answers if one["meta_info"]["finish_reason"]]
                    else:
                        answers = answer.json() if n > 1 else [answer.json()]
                    counts = [
                        (one["meta_info"]["reasoning_tokens"], one["meta_info"]["completion_tokens"])
                        for one in answers
                    ]
                    self.assertEqual(counts, [(6, 6)] * n)
                    steps = [one["meta_info"]["spec_verify_ct"] for one in answers]
                    self.assertLess(max(steps), 5, "each step had one token")


if __name__ == "__main__":
    unittest.main()
