"""The published drafters of docs/ddtree-drafters.md, and those of SGLang's own tests."""

import tempfile
import unittest
from pathlib import Path

from sglang.srt.speculative.ddtree.verdict import check
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import DEFAULT_DRAFT_MODEL_DFLASH, CustomTestCase
from support.published import DRAFTERS, SERVER, tables, write_pair

register_cpu_ci(est_time=60, suite="unit")

DOCUMENT = Path(__file__).parents[2] / "docs" / "ddtree-drafters.md"
# The drafters of SGLang's tests (test/registered/spec/dflash), with the arguments of their servers, and what DDTREE
# refuses of these.
UPSTREAM = (
    (DEFAULT_DRAFT_MODEL_DFLASH, ["--attention-backend", "flashinfer", "--page-size", "256"], None),
    (DEFAULT_DRAFT_MODEL_DFLASH, ["--attention-backend", "flashinfer", "--chunked-prefill-size", "4"], None),
    ("Huang2020/Qwen3-8B-Domino-b16", ["--attention-backend", "triton", "--disable-overlap-schedule"], None),
    ("z-lab/Qwen3.5-4B-DFlash", ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "256"], None),
    ("meta-models/Muse-Glimmer-30B-assistant", ["--speculative-dflash-block-size", "5"], None),
    ("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash (dflash/)", ["--attention-backend", "fa3", "--page-size", "1"], None),
    ("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash (dflash/)", ["--tp-size", "16", "--dp-size", "2", "--enable-dp-attention"],
     "--enable-dp-attention: expected False, got True"),
)  # fmt: skip


class TestPublished(CustomTestCase):
    def test_the_document_states_the_verdicts(self):
        """`python -m support.published` prints what the document should say."""
        self.assertIn(tables(), DOCUMENT.read_text())

    def test_names_are_unique(self):
        names = [drafter.name for drafter in DRAFTERS]
        self.assertEqual(len(names), len(set(names)))

    def test_upstreams_tests(self):
        drafters = {drafter.name: drafter for drafter in DRAFTERS}
        for name, arguments, refusal in UPSTREAM:
            with self.subTest(name, arguments=arguments), tempfile.TemporaryDirectory() as folder:
                drafter = drafters[name]
                pair = write_pair(Path(folder, "pair"), drafter.family, drafter.kind)
                refusals = check(*pair, [*SERVER, *arguments]).refusals
                if refusal is None:
                    self.assertEqual(refusals, [])
                else:
                    self.assertRegex(refusals[0], refusal)


if __name__ == "__main__":
    unittest.main()
