"""Traces: what they hold, and the picture of a tree."""

import contextlib
import io
import json
import re
import tempfile
import unittest
from pathlib import Path
from xml.etree import ElementTree

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path, build_trees
from sglang.srt.speculative.ddtree.budget import Load, Step, StepCosts
from sglang.srt.speculative.ddtree.draw import draw, find_tree, main, rows_of
from sglang.srt.speculative.ddtree.expectation import Expectation
from sglang.srt.speculative.ddtree.trace import Trace, read_trace, replay
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

ENTRY = dict(
    id="r1", tokens=[10, 11, 12, 13, 14], parents=[-1, 0, 0, 1, 1], probabilities=[0, 0.5, 0.25, 0.5, 0.125],
    path=[0, 1, 4], emitted=[11, 14, 99],
)  # fmt: skip


class TestDraw(CustomTestCase):
    def test_nodes_do_not_overlap(self):
        self.assertEqual(rows_of(ENTRY["parents"]), [0, 0, 2, 0, 1])
        parents = [-1, 0, 1, 2, 0, 1, 0, 6]
        depths = [0, 1, 2, 3, 1, 2, 1, 2]
        places = list(zip(depths, rows_of(parents)))
        self.assertEqual(len(set(places)), len(places))

    def test_picture(self):
        svg = draw(ENTRY, "step 3 <&", name=lambda token: f"<{token}>")
        ElementTree.fromstring(svg)
        self.assertIn("step 3 &lt;&amp;", svg)
        ElementTree.fromstring(draw(ENTRY, "", name=lambda token: "&" * 50))
        names = re.findall(r"&lt;(\d+)&gt;", svg)
        self.assertEqual(sorted(names), ["10", "11", "12", "13", "14", "99"], "the nodes and the bonus token")
        self.assertEqual(svg.count('stroke="#1a7f37"'), 2 + 3 + 1, "accepted: lines, nodes, the bonus token")

    def write(self, lines):
        path = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def test_which_tree(self):
        lone = ENTRY | dict(id="r0", tokens=[7], parents=[-1])
        path = self.write(
            [
                {"header": {}},
                {"step": 0, "width": 1, "requests": [lone]},
                {"step": 1, "width": 5, "requests": [ENTRY, ENTRY | dict(id="r2")]},
            ]
        )
        self.assertEqual([find_tree(path, None, None)[0], find_tree(path, None, "r2")[1]["id"]], [1, "r2"])
        self.assertEqual(find_tree(path, 0, None)[1]["id"], "r0")
        with self.assertRaisesRegex(ValueError, "expected step 7, got a trace of 2 steps"):
            find_tree(path, 7, None)
        output = path.with_name("tree.svg")
        main([str(path), "--step", "1", "--request", "r2", "--output", str(output)])
        self.assertIn("request r2: 5 nodes, 3 tokens emitted", output.read_text())
        for wrong, expected in (
            (["--output", "/"], "--output: expected a file that can be written, got /"),
            (
                ["--tokenizer", "/no/such"],
                "--tokenizer: expected a folder or repository with a tokenizer, got /no/such",
            ),
        ):
            errors = io.StringIO()
            with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
                main([str(path), *wrong])
            self.assertIn(expected, errors.getvalue())

    def test_another_file(self):
        with self.assertRaisesRegex(ValueError, "expected a file that --speculative-ddtree-trace wrote"):
            find_tree(self.write([{"step": 1}]), None, None)
        with self.assertRaisesRegex(ValueError, "/no/such: expected a file .* got No such file or directory"):
            find_tree(Path("/no/such"), None, None)


class TestTrace(CustomTestCase):
    def test_it_holds_calls_and_trees(self):
        path = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace")
        widths, table = (1, 4, 8), {(1, 1): (1.0, 0.0), (1, 4): (1.5, 0.0), (1, 8): (2.0, 0.0)}
        expectation = Expectation(widths=widths, max_requests=2, block_size=4, num_candidates=3, device="cpu")
        trace = Trace(str(path), 4, expectation, StepCosts(widths, [1], table))
        load = Load(1, 100, 0)
        trees, accepted = DraftTrees.allocate(2, 8, "cpu"), Accepted.allocate(2, 4, "cpu")
        candidates = torch.arange(18).view(2, 3, 3)
        logs = torch.tensor([0.5, 0.25, 0.125]).log().expand(2, 3, 3).contiguous()
        build_trees(candidates, logs, torch.tensor([50, 51]), trees, scores=expectation.scores)
        expectation.predict(trees, candidates)
        accept_path(trees, torch.zeros(2, 8, dtype=torch.int64), accepted)
        for step in range(4):
            trace.choose(load, 8)
            trace.observe(Step(load, 8, 2.0, (1.0, 1.5, 1.75), 1.5))
            trace.step(trees, accepted, ["a", f"b{step}"])
        header, *lines = read_trace(path)
        self.assertEqual(header["header"]["widths"], [1, 4, 8])
        steps = [line for line in lines if "step" in line]
        self.assertEqual([line["step"] for line in steps], [0, 1], "two steps may be on their way")
        first, second = steps[1]["requests"]
        self.assertEqual(
            (first["id"], second["id"], first["tokens"][0], second["tokens"][0]), ("a", "b1", 50, 51)
        )
        self.assertEqual((first["path"], first["emitted"]), ([0, 1], [0, 0]))
        self.assertEqual(first["probabilities"][:2], [0.0, 0.5])
        recorded, chosen = replay(read_trace(path))
        self.assertEqual((recorded, len(chosen)), ([8] * 4, 4))

    def test_a_file_that_cannot_be_written(self):
        expectation = Expectation(widths=(4,), max_requests=1, block_size=3, num_candidates=2, device="cpu")
        with self.assertRaisesRegex(
            ValueError, "--speculative-ddtree-trace: expected a file that can be written"
        ):
            Trace("/", 3, expectation, None)

    def test_a_full_disk_ends_the_trace_and_no_server(self):
        expectation = Expectation(widths=(4,), max_requests=1, block_size=3, num_candidates=2, device="cpu")
        with self.assertLogs("sglang.srt.speculative.ddtree.trace", "WARNING") as log:
            trace = Trace("/dev/full", 3, expectation, None)
            for _ in range(3):
                trace.choose(Load(1, 10, 0), 4)
                trace.step(DraftTrees.allocate(1, 4, "cpu"), Accepted.allocate(1, 3, "cpu"), ["a"])
        self.assertEqual(len(log.output), 1)
        self.assertIn("/dev/full cannot be written", log.output[0])


if __name__ == "__main__":
    unittest.main()
