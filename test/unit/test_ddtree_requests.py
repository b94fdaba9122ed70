"""Which requests DDTREE refuses, through the seam in upstream's validate_dflash_request."""

import unittest
from types import SimpleNamespace

from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.dflash_utils import validate_dflash_request
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import ArgumentsCase

register_cpu_ci(est_time=12, suite="unit")


class TestRequests(ArgumentsCase):
    def request(self, **parameters):
        neutral = dict(
            return_sampling_mask=False, return_hidden_states=False,
            sampling_params=SamplingParams(),
        )  # fmt: skip
        return SimpleNamespace(**neutral | parameters)

    def test_refused_by_name_through_the_seam(self):
        publish(self.resolve(), role="scheduler")
        self.assertIsNone(validate_dflash_request(self.request(), False))
        for name, value in (
            ("return_sampling_mask", True), ("return_hidden_states", True),
        ):  # fmt: skip
            with self.subTest(name):
                self.assertIn(name, validate_dflash_request(self.request(**{name: value}), False))

    def test_a_seed_with_several_answers(self):
        publish(self.resolve(), role="scheduler")
        for text, options in (
            ("a seed with n > 1 (seed 5, n 3)", dict(sampling_seed=5, n=3)),
            (None, dict(sampling_seed=5, n=1)),
            (None, dict(n=3)),
            (None, dict(sampling_seed=5, n=3, temperature=0)),
        ):
            params = SamplingParams(**options)
            params.normalize(None)
            found = validate_dflash_request(self.request(sampling_params=params), False)
            if text is None:
                self.assertIsNone(found)
            else:
                self.assertIn(text, found)

    def test_other_algorithms_are_left_alone(self):
        publish(self.resolve(speculative_algorithm=None, speculative_draft_model_path=None), role="scheduler")
        self.assertIsNone(validate_dflash_request(self.request(return_sampling_mask=True), False))


if __name__ == "__main__":
    unittest.main()
