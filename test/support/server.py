"""Checks of a DDTREE server over HTTP, on any device."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from typing import Any

import requests
from sglang.srt.utils import kill_process_tree
from sglang.test.test_utils import popen_launch_server

from support.logit_processors import NO_BIGRAM_TWICE
from support.models import MASK_TOKEN, text_of, write_models_for

PORT = int(os.environ.get("SGLANG_TEST_PORT", "21090")) + 7
URL = f"http://127.0.0.1:{PORT}"
PROMPT = [3, 10, 7, 12, 5, 9]


def last_event(stream: requests.Response) -> dict[str, Any]:
    """The last event of a streamed answer, which holds all of it."""
    events = [line for line in stream.iter_lines() if line.startswith(b"data: {")]
    return json.loads(events[-1][6:])


class ServerChecks:
    """Test methods for a unittest.TestCase. All of them ask one server, which setUpClass starts.

    Attributes:
        device: the server's device.
        flags: further flags of the server.
        target: folder of the model that it serves.
    """

    device = "cpu"
    flags = ("--mem-fraction-static", "0.1")
    target: str

    @classmethod
    def setUpClass(cls) -> None:
        _, cls.target, drafter = write_models_for(cls)
        process = popen_launch_server(
            cls.target,
            URL,
            timeout=400,
            device=cls.device,
            other_args=[
                "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", drafter,
                "--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "8",
                "--enable-metrics", "--enable-custom-logit-processor", "--skip-server-warmup", *cls.flags,
            ],
        )  # fmt: skip
        cls.addClassCleanup(kill_process_tree, process.pid)

    def generate(self, **body: Any) -> requests.Response:
        """Ask for 40 greedy tokens after PROMPT; `body` changes fields of the request."""
        sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True} | body.pop(
            "sampling_params", {}
        )
        return requests.post(
            f"{URL}/generate", json={"input_ids": PROMPT, "sampling_params": sampling} | body, timeout=300
        )

    def test_n(self) -> None:
        answers = self.generate(sampling_params={"n": 3, "temperature": 0}).json()
        self.assertEqual(len(answers), 3)
        self.assertEqual(len({tuple(answer["output_ids"]) for answer in answers}), 1)

    def test_stream_is_the_answer(self) -> None:
        whole = self.generate().json()
        self.assertEqual(whole["meta_info"]["completion_tokens"], 40)
        self.assertEqual(last_event(self.generate(stream=True))["text"], whole["text"])

    def test_stop_string(self) -> None:
        whole = self.generate().json()["text"]
        stop = whole[12]
        stopped = self.generate(sampling_params={"stop": [stop]}).json()["text"]
        self.assertEqual(stopped, whole[: whole.index(stop)])

    def test_stop_strings_of_several_tokens(self) -> None:
        """Answer, stream and token count end with the stop string's last symbol, also inside a path."""
        ids = self.generate().json()["output_ids"]
        steps = self.generate().json()["meta_info"]["spec_verify_ct"]
        self.assertLess(steps, 30, "few paths have more than one token")
        for start in range(0, 30, 6):
            stop = text_of(ids[start : start + 3])
            end = next(n for n in range(len(ids)) if stop in text_of(ids[:n]))
            shown = text_of(token for token in ids[:end] if token > MASK_TOKEN)  # without special tokens
            for options in ({}, {"no_stop_trim": True}):
                at = shown.find(stop)
                cut = len(shown) if at < 0 else at + len(stop) * len(options)
                for stream in (False, True):
                    with self.subTest(stop=stop, stream=stream, **options):
                        answer = self.generate(sampling_params={"stop": stop} | options, stream=stream)
                        answer = last_event(answer) if stream else answer.json()
                        self.assertEqual(answer["output_ids"], ids[:end])
                        self.assertEqual(answer["text"], shown[:cut])
                        self.assertEqual(
                            answer["meta_info"]["finish_reason"], {"type": "stop", "matched": stop}
                        )
                        self.assertEqual(answer["meta_info"]["completion_tokens"], end)
                        self.assertEqual(answer["meta_info"]["prompt_tokens"], len(PROMPT))

    def test_stop_string_in_the_openai_api(self) -> None:
        ids = self.generate().json()["output_ids"]
        stop = text_of(ids[8:11])
        body = {
            "model": "default",
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 40,
            "ignore_eos": True,
            "stop": stop,
        }
        answer = requests.post(f"{URL}/v1/completions", json=body, timeout=300).json()
        expected = self.generate(sampling_params={"stop": stop}).json()
        self.assertEqual(answer["choices"][0]["text"], expected["text"])
        self.assertEqual(answer["choices"][0]["finish_reason"], "stop")
        self.assertEqual(answer["usage"]["completion_tokens"], expected["meta_info"]["completion_tokens"])

    def test_regex(self) -> None:
        text = self.generate(sampling_params={"regex": r"\[[01]{5}\]", "ignore_eos": False}).json()["text"]
        self.assertRegex(text, r"^\[[01]{5}\]$")

    def test_json_schema(self) -> None:
        schema = json.dumps(
            {
                "type": "object",
                "properties": {"a": {"enum": [0, 1]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        )
        answer = self.generate(sampling_params={"json_schema": schema, "ignore_eos": False}).json()
        self.assertIn(json.loads(answer["text"]), ({"a": 0}, {"a": 1}))

    def test_penalties(self) -> None:
        """With strong penalties no token repeats while others are left."""
        ids = self.generate(
            sampling_params={"presence_penalty": 2, "frequency_penalty": 2, "max_new_tokens": 6}
        )
        self.assertEqual(len(set(ids.json()["output_ids"])), 6)
        free = self.generate(sampling_params={"max_new_tokens": 6}).json()["output_ids"]
        self.assertLess(len(set(free)), 6)

    def test_min_new_tokens(self) -> None:
        """A stop token that would come earlier is held off."""
        free = self.generate().json()["output_ids"]
        stop = {"stop_token_ids": [free[4]], "ignore_eos": False}
        self.assertLessEqual(len(self.generate(sampling_params=stop).json()["output_ids"]), 5)
        late = self.generate(sampling_params=stop | {"min_new_tokens": 20}).json()["output_ids"]
        self.assertGreaterEqual(len(late), 20)
        self.assertNotIn(free[4], late[:19])

    def test_custom_logit_processor(self) -> None:
        """No pair of tokens comes twice, although a step emits several tokens and may begin before the host has the last."""
        free = self.generate().json()["output_ids"]
        found = self.generate(
            sampling_params={"custom_params": NO_BIGRAM_TWICE["custom_params"]},
            custom_logit_processor=NO_BIGRAM_TWICE["custom_logit_processor"],
        ).json()["output_ids"]
        self.assertEqual(len(found), 40)
        for tokens, repeats in ((free, True), (found, False)):
            pairs = list(pairwise([*PROMPT, *tokens]))
            self.assertEqual(len(set(pairs)) < len(pairs), repeats)

    def test_seed(self) -> None:
        """A seed repeats a sampled answer. Several answers of one seed are refused."""
        sampled = {"temperature": 2.0, "max_new_tokens": 20}
        seeds = (5, 5, 6, None, None)
        answers = [
            tuple(self.generate(sampling_params=sampled | {"sampling_seed": seed}).json()["output_ids"])
            for seed in seeds
        ]
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(len(set(answers)), 4)
        refused = self.generate(sampling_params=sampled | {"sampling_seed": 5, "n": 3})
        self.assertEqual(refused.status_code, 400)
        self.assertIn("DDTREE does not support a seed with n > 1", refused.text)
        self.assertEqual(self.generate().status_code, 200)

    def test_weight_update(self) -> None:
        """An update with the target's own weights changes neither answers nor accept length."""
        before = self.generate().json()
        body = {"model_path": self.target, "flush_cache": False}
        answer = requests.post(f"{URL}/update_weights_from_disk", json=body, timeout=300)
        self.assertTrue(answer.json()["success"], answer.text)
        after = self.generate().json()
        self.assertEqual(after["output_ids"], before["output_ids"])
        self.assertEqual(after["meta_info"]["spec_verify_ct"], before["meta_info"]["spec_verify_ct"])

    def test_metrics(self) -> None:
        self.generate()
        text = requests.get(f"{URL}/metrics", timeout=60).text
        value = {
            name: sum(
                float(v)
                for v in re.findall(rf"^sglang:ddtree_{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M)
            )
            for name in ("accept_length_count", "accept_length_sum", "accepted_nodes_total", "tree_nodes")
        }
        self.assertEqual(value["tree_nodes"], 32)
        self.assertGreater(value["accept_length_count"], 0)
        # Each step emits its accepted nodes and the bonus token.
        self.assertEqual(
            value["accept_length_sum"], value["accepted_nodes_total"] + value["accept_length_count"]
        )
