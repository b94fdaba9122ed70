"""Where a request ends among the tokens of one step: stop_at_first() on upstream's own Req."""

import unittest
from array import array
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ddtree import stops
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")


class Letters:
    """A tokenizer with one token per letter: 0 is a."""

    eos_token_id = 25  # z
    additional_stop_token_ids = None

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)


class TestStopAtFirst(CustomTestCase):
    def end(self, before, step, algorithm="DDTREE", max_new_tokens=99, **options):
        """Emit `step` after `before`; return whether the request ended, its output and the reason."""
        params = SamplingParams(max_new_tokens=max_new_tokens, **options)
        params.normalize(Letters())
        req = Req("r", "", array("q", [1]), params)
        req.tokenizer = Letters()
        req.output_ids.extend(Letters().encode(before + step))
        with patch.object(stops, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm)):
            ended = stops.stop_at_first(req, len(step))
        self.assertEqual(req.tokenizer.decode(req.output_ids), before + step, "tokens were lost")
        self.assertEqual(ended, req.finished())
        reason = req.finished_reason.to_json() if ended else {}
        return ended, req.tokenizer.decode(req.output_ids_through_stop), reason

    def test_the_first_stop_ends_it(self):
        for options, output, matched in (
            (dict(stop=["ef", "cd"]), "abcd", "cd"),
            (dict(stop=["ef", "bc"]), "abc", "bc"),  # it began in the previous step
            (dict(stop=["gh"], stop_regex=["d.f"]), "abcdef", "d.f"),
            (dict(stop=["fgz"], stop_token_ids=[3]), "abcd", 3),
            (dict(stop=["zz"]), "abcdefgz", 25),
        ):
            with self.subTest(**options):
                ended, text, reason = self.end("ab", "cdefgzh", **options)
                self.assertEqual((ended, text, reason["matched"]), (True, output, matched))

    def test_no_stop(self):
        self.assertEqual(self.end("ab", "cdef", stop=["ba", "q"]), (False, "abcdef", {}))

    def test_the_length_comes_first(self):
        ended, text, reason = self.end("ab", "cdef", stop=["ef"], max_new_tokens=4)
        self.assertEqual((ended, text, reason["type"]), (True, "abcd", "length"))

    def test_other_algorithms_are_left_alone(self):
        for algorithm in (None, "DFLASH", "EAGLE"):
            self.assertEqual(self.end("ab", "cdef", algorithm, stop=["cd"]), (False, "abcdef", {}))

    def test_without_strings_it_leaves_the_search_to_upstream(self):
        self.assertEqual(self.end("ab", "cdzf", stop_token_ids=[3]), (False, "abcdzf", {}))

    def test_one_token_reads_no_configuration(self):
        with patch.object(stops, "get_spec", side_effect=AssertionError):
            for emitted in (0, 1):
                req = SimpleNamespace(sampling_params=None)
                self.assertFalse(stops.stop_at_first(req, emitted))


if __name__ == "__main__":
    unittest.main()
