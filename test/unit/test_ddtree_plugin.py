"""DDTREE where the plug-ins were not loaded: registered when it is asked for, or refused with the reason."""

import os
import unittest
from unittest import mock

from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")


class TestRegisterOnDemand(CustomTestCase):
    def setUp(self):
        for patched in (
            mock.patch.dict(spec_registry._REGISTRY, clear=True),
            mock.patch.dict(os.environ, {"SGLANG_PLUGINS": ""}),
        ):
            patched.start()
            self.addCleanup(patched.stop)

    def test_the_algorithm_is_registered_when_it_is_asked_for(self):
        algorithm = SpeculativeAlgorithm.from_string("ddtree")
        self.assertEqual(algorithm.name, "DDTREE")
        self.assertIs(SpeculativeAlgorithm.from_string("DDTREE"), algorithm)

    def test_an_excluded_plugin_is_named(self):
        os.environ["SGLANG_PLUGINS"] = "one, other"
        with self.assertRaisesRegex(
            ValueError, "expected SGLANG_PLUGINS to contain 'ddtree'.*got 'one, other'"
        ):
            SpeculativeAlgorithm.from_string("DDTREE")

    def test_a_list_with_the_plugin_does_not_exclude_it(self):
        os.environ["SGLANG_PLUGINS"] = "one, ddtree"
        self.assertEqual(SpeculativeAlgorithm.from_string("DDTREE").name, "DDTREE")

    def test_a_failure_is_named(self):
        failing = mock.Mock(side_effect=ImportError("no library libx.so"))
        with (
            mock.patch("sglang.srt.layers.attention.attention_registry.register_attention_backend", failing),
            self.assertRaisesRegex(ValueError, "the plug-in failed with ImportError: no library libx.so"),
        ):
            SpeculativeAlgorithm.from_string("DDTREE")
        # What failed halfway is not taken for registered.
        self.assertEqual(SpeculativeAlgorithm.from_string("DDTREE").name, "DDTREE")

    def test_another_unknown_name_is_upstreams_matter(self):
        with self.assertRaisesRegex(ValueError, "Unknown speculative algorithm name: DTREE"):
            SpeculativeAlgorithm.from_string("DTREE")


if __name__ == "__main__":
    unittest.main()
