"""What is refused at a request's door, and that plain requests are not."""

import json
import unittest
from array import array
from types import SimpleNamespace
from unittest import mock

import numpy as np
from sglang.srt.managers import request_checks
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.request_checks import MAX_NESTING, MAX_SAMPLES, check_request, check_tokenized
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")

VOCABULARY = 100
CONFIG = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=2)


def generate(sampling=None, **fields):
    parameters = SamplingParams(**(sampling or {}))
    parameters.normalize(SimpleNamespace(encode=lambda text, add_special_tokens: [1]))
    request = dict(
        rid="r", input_text=None, input_ids=array("q", [0, 3, VOCABULARY - 1]), input_embeds=None, mm_inputs=None,
        token_type_ids=None, sampling_params=parameters, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False,
    )  # fmt: skip
    return TokenizedGenerateReqInput(**request | fields)


class TestRequestChecks(CustomTestCase):
    def refused(self, says, sampling=None, **fields):
        with self.assertRaisesRegex(ValueError, says):
            check_tokenized(generate(sampling, **fields), CONFIG)

    def test_plain_requests_pass(self):
        for sampling in (
            {},
            {
                "temperature": 0,
                "stop": ["a"],
                "stop_token_ids": [5],
                "min_new_tokens": 2,
                "top_k": 20,
                "n": 3,
            },
            {"logit_bias": {"5": -100.0}, "sampling_seed": 2**63 - 1, "custom_params": {"a": [1, "b", None]}},
            {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})},
            {"regex": r"\[" * 3 * MAX_NESTING},
            {"max_new_tokens": None},
        ):
            with self.subTest(sampling):
                check_tokenized(generate(sampling), CONFIG)
        check_tokenized(generate(return_logprob=True, logprob_start_len=0, top_logprobs_num=5), CONFIG)
        check_tokenized(generate(bootstrap_room=2**63 - 1), CONFIG)

    def test_a_prompt_has_tokens_of_the_vocabulary(self):
        self.refused("prompt: expected at least one token, got none", input_ids=array("q"))
        self.refused("prompt: expected token ids from 0 to 99, got -1", input_ids=array("q", [1, -1]))
        self.refused("prompt: expected token ids from 0 to 99, got 100", input_ids=array("q", [VOCABULARY]))
        embedding = TokenizedEmbeddingReqInput(
            rid="r",
            input_text="",
            input_ids=array("q"),
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=SamplingParams(),
        )
        with self.assertRaisesRegex(ValueError, "at least one token"):
            check_tokenized(embedding, CONFIG)

    def test_fields_decode_as_the_scheduler_decodes_them(self):
        self.refused("declared types: Expected `int`, got `str`", return_logprob=True, top_logprobs_num="3")
        self.refused("declared types: Expected `bool", {"ignore_eos": "x"})
        self.refused("can be sent", {"max_new_tokens": 2**64})
        self.refused("positional_embed_overrides: expected", positional_embed_overrides={"a": None})

    def test_what_a_program_passes_to_its_own_engine_is_not_refused(self):
        check_tokenized(generate({"temperature": np.float32(0.5), "logit_bias": {5: 1}}), CONFIG)
        check_tokenized(generate({"custom_params": {"a": {"b": [object()]}}}), CONFIG)
        check_tokenized(generate(custom_logit_processor=object()), CONFIG)

    def test_embeddings_are_as_wide_as_the_model(self):
        check_tokenized(generate(input_ids=None, input_embeds=[[0.1, 0.2]]), CONFIG)
        for wrong in ([], [[0.1]], [[0.1, 0.2], [0.1]]):
            self.refused(
                "input_embeds: expected at least one row, each of 2 numbers",
                input_ids=None,
                input_embeds=wrong,
            )

    def test_integers_fit_into_their_tensors(self):
        self.refused(
            "top_k: expected a number from -2147483648 to 2147483647, got 2147483648", {"top_k": 2**31}
        )
        self.refused("min_new_tokens: expected", {"min_new_tokens": 2**31, "max_new_tokens": None})
        self.refused("priority: expected", priority=2**40)

    def test_floats_are_finite(self):
        for value in (float("nan"), float("inf"), 1e300):
            self.refused("logit_bias: expected|logit_bias of token 5: expected", {"logit_bias": {"5": value}})
            self.refused("temperature: expected", {"temperature": value})

    def test_logits_stay_finite(self):
        for bias in (1e30, -1e30):
            check_tokenized(generate({"logit_bias": {"5": bias}, "repetition_penalty": 1e-20}), CONFIG)
            self.refused("logit_bias of token 5: expected", {"logit_bias": {"5": 2 * bias}})
        self.refused("repetition_penalty: expected a number from 1e-20 to 2", {"repetition_penalty": 1e-21})

    def test_ids_and_counts_are_of_the_vocabulary(self):
        self.refused("stop_token_ids: expected a number from 0 to 99, got 100", {"stop_token_ids": [100]})
        many = list(range(VOCABULARY // 2 + 1))
        check_tokenized(generate({"stop_token_ids": many}), CONFIG)
        check_tokenized(generate({"stop_token_ids": many[1:], "min_new_tokens": 2}), CONFIG)
        self.refused(
            "stop_token_ids: expected at most 50 tokens with min_new_tokens, got 51",
            {"stop_token_ids": many, "min_new_tokens": 2},
        )
        self.refused("top_logprobs_num: expected a number from 0 to 100, got 101", top_logprobs_num=101)
        self.refused("logprob_start_len: expected a number from -1", logprob_start_len=-2)

    def test_grammars_are_neither_long_nor_deep(self):
        self.refused("regex: expected at most 262144 characters, got 262145", {"regex": "x" * (2**18 + 1)})
        deep = "(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1)
        self.refused(f"regex: expected at most {MAX_NESTING} brackets open at a time", {"regex": deep})
        self.refused("ebnf: expected at most", {"ebnf": "root ::= " + deep})
        self.refused("json_schema: expected at most", {"json_schema": "[" * 1000})

    def test_labels_are_those_of_the_metrics(self):
        def ask(labels, allowed):
            observability = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=allowed)
            with mock.patch.object(request_checks, "get_observability", return_value=observability):
                check_request(SimpleNamespace(sampling_params=None, custom_labels=labels))

        ask(None, None)
        ask({"team": "a"}, ["team"])
        with self.assertRaisesRegex(ValueError, r"custom_labels: .*\['team'\]\), got \['other'\]"):
            ask({"team": "a", "other": "b"}, ["team"])
        with self.assertRaisesRegex(ValueError, "custom_labels: "):
            ask({"team": "a"}, None)

    def test_samples_are_limited(self):
        def ask(sampling):
            check_request(SimpleNamespace(sampling_params=sampling))

        for fine in (None, {}, {"n": MAX_SAMPLES}, [{"n": 1}, {}], {"n": None}):
            ask(fine)
        for wrong in (2**31, 0, -1, "2", True, 1.5):
            with self.assertRaisesRegex(ValueError, "n: expected an integer from 1 to"):
                ask({"n": wrong})
            with self.assertRaises(ValueError):
                ask([{}, {"n": wrong}])


if __name__ == "__main__":
    unittest.main()
