"""What a step costs: measured on made-up requests, and kept on the disk."""

import json
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.speculative.ddtree import step_costs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="unit")

WIDTHS, BATCHES = (1, 4), [1, 2]
TABLE = {(bs, width): (0.001 * bs * width, 1e-8) for bs in BATCHES for width in WIDTHS}


def graphs():
    """Graphs of two widths, over a slot table of three requests and padding."""
    table = torch.arange(4 * 200, dtype=torch.int32).view(4, 200)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=SimpleNamespace(size=1000)
    )
    totals = torch.full((2, 3), 7, dtype=torch.int64)
    return SimpleNamespace(
        target_runner=runner,
        widths=WIDTHS,
        batch_sizes=BATCHES,
        commits=SimpleNamespace(expectation=SimpleNamespace(totals=totals)),
    )


class TestMeasure(CustomTestCase):
    def measure(self, run):
        given = graphs()
        self.table = given.target_runner.req_to_token_pool.req_to_token
        self.totals = given.commits.expectation.totals
        with patch.object(step_costs, "_time", run):
            return step_costs.measure(given)

    def test_a_line_through_two_contexts(self):
        found = self.measure(lambda graphs, rows, context, width: 1e-3 * width + 1e-6 * len(rows) * context)
        self.assertEqual(found.keys(), TABLE.keys())
        for (_, width), (fixed, slope) in found.items():
            self.assertAlmostEqual(fixed, 1e-3 * width)
            self.assertAlmostEqual(slope, 1e-6)

    def test_made_up_requests_leave_nothing(self):
        """Their slots are not other requests' slots, and what they accept is no evidence."""
        seen = []

        def run(graphs, rows, context, width):
            seen.append(self.table.clone())
            self.totals += 1000
            return 1e-3

        before = graphs().target_runner.req_to_token_pool.req_to_token
        self.measure(run)
        slots = seen[0][1:]
        self.assertEqual(slots.unique().numel(), slots.numel())
        self.assertTrue(((slots > 0) & (slots < 1000)).all())
        self.assertTrue(self.table.equal(before))
        self.assertTrue((self.totals == 7).all())

    def test_a_failure_leaves_nothing_either(self):
        def run(graphs, rows, context, width):
            self.totals += 1000
            raise RuntimeError

        with self.assertRaises(RuntimeError):
            self.measure(run)
        self.assertTrue((self.totals == 7).all())


class TestDisk(CustomTestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(patch.object(torch.cuda, "get_device_name", lambda: "a GPU"))

    def test_what_is_written_is_read(self):
        path = self.folder / "new" / "costs.json"
        step_costs._write(path, TABLE)
        self.assertEqual(step_costs._read(path, graphs()), TABLE)
        self.assertEqual(list(path.parent.iterdir()), [path])

    def test_other_files_are_not_read(self):
        rows = [[bs, width, *times] for (bs, width), times in TABLE.items()]
        contents = {
            "not JSON": "{",
            "no text": b"\xff\xfe",
            "another file": "[]",
            "no rows": json.dumps(dict(seconds=[])),
            "a row is missing": json.dumps(dict(seconds=rows[1:])),
            "a time of 0": json.dumps(dict(seconds=[[*rows[0][:2], 0.0, 0.0], *rows[1:]])),
            "not a number": json.dumps(dict(seconds=[[*rows[0][:2], float("nan"), 0.0], *rows[1:]])),
        }
        path = self.folder / "costs.json"
        for name, content in contents.items():
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            with self.subTest(name):
                self.assertIsNone(step_costs._read(path, graphs()))
        self.assertIsNone(step_costs._read(self.folder, graphs()), "a folder")
        self.assertIsNone(step_costs._read(self.folder / "none", graphs()))

    def test_a_disk_that_takes_nothing_ends_no_server(self):
        def full(path, text):
            path.write_bytes(text[:10].encode())
            raise OSError(28, "No space left on device")

        with patch.object(Path, "write_text", full), self.assertLogs(step_costs.logger, "WARNING") as log:
            step_costs._write(self.folder / "costs.json", TABLE)
        self.assertIn("No space left on device", log.output[0])
        self.assertEqual(list(self.folder.iterdir()), [])
        (self.folder / "file").write_text("")
        with self.assertLogs(step_costs.logger, "WARNING"):
            step_costs._write(self.folder / "file" / "costs.json", TABLE)


if __name__ == "__main__":
    unittest.main()
