"""A tiny DeepSeek-V4 under the graph guard, with index keys in fp8 and in bfloat16.

Its attention uses five streams. Answers with graphs must equal those without, token for token. The instruments must be
silent, and each must find a fault that is planted.
"""

import json
import os
import tempfile
import unittest
from functools import partial
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci
from support.deepseek_v4 import (
    KEYS,
    REPRODUCIBLE,
    Answers,
    IndexKeysCase,
    WriteToPage,
    add_to_weights_in_captures,
    drop_query_before_join,
    first_differences,
    selects_all,
    start,
)
from support.processes import run_all

register_cuda_ci(est_time=400, suite="gpu")

SECONDS = int(os.environ.get("DEEPSEEK_V4_SECONDS", "400"))
AT_ONCE = 8  # engines
# Tokens of each answer, by batch size. Every token after the first is one decode step of the batch.
TOKENS = {1: 48, 2: 48, 5: 48, 8: 48}
MANY_TOKENS = {1: 1201, 2: 401, 5: 401, 8: 601, 16: 801, 32: 1601}  # 5,000 steps


class TestDeepSeekV4(IndexKeysCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.folder = Path(os.environ.get("DEEPSEEK_V4_LOGS", folder))
        starts = {}
        for keys in KEYS:
            engine = partial(partial, start, cls.folder, dsv4_index_k_dtype=keys)
            races = partial(cls.races, keys)
            probe = {"debug_graph_diff": r"indexer\.(wq_b|weights_proj)|ddtree_index_logits"}
            starts |= {
                (keys, "eager"): engine(
                    Answers(MANY_TOKENS, eager=True), disable_cuda_graph=True, **REPRODUCIBLE
                ),
                (keys, "graph"): engine(Answers(MANY_TOKENS), **races("graph"), **REPRODUCIBLE),
                (keys, "default selection"): engine(
                    Answers(TOKENS), debug_graph_canary=1, **races("default selection")
                ),
                (keys, "unguarded"): engine(Answers(TOKENS, guard=False), **races("unguarded")),
                (keys, "probe"): engine(Answers({1: 12, 5: 12}), **probe, **REPRODUCIBLE),
                (keys, "probe, planted"): engine(Answers({2: 4}, before=add_to_weights_in_captures), **probe),
                (keys, "canary, planted"): engine(
                    Answers({2: 48}, each_turn=WriteToPage()), debug_graph_canary=1
                ),
            }
        engine = partial(partial, start, cls.folder, dsv4_index_k_dtype="bf16")
        for name, guard in (("dropped, guarded", True), ("dropped, unguarded", False)):
            job = Answers(TOKENS, guard=guard, before=drop_query_before_join)
            starts["bf16", name] = engine(job, **cls.races("bf16", name))
        job = Answers({5: 8}, guard=False, before=drop_query_before_join)
        starts["bf16", "dropped, probe"] = engine(job, debug_graph_diff="ddtree_index_logits")
        cls.results = {}
        for name, result in run_all(starts, AT_ONCE, SECONDS):
            cls.results[name] = result
            if "DEEPSEEK_V4_LOGS" in os.environ:
                kept = {str(key): str(result) for key, result in cls.results.items()}
                (cls.folder / "results.json").write_text(json.dumps(kept, indent=1))

    @classmethod
    def races(cls, keys, name):
        """The argument for the detector's report of this engine."""
        return {"debug_graph_races": str(cls.folder / f"{name}, {keys}.races.json")}

    def report(self, keys, name):
        return json.loads(Path(self.races(keys, name)["debug_graph_races"]).read_text())

    def test_graphs_answer_like_eager_runs(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                graph, eager = self.of(keys, "graph").outputs, self.of(keys, "eager").outputs
                for batch, tokens in MANY_TOKENS.items():
                    self.assertEqual(
                        [len(answer) for answer in graph[batch] + eager[batch]], [tokens] * 2 * batch
                    )
                    self.assertEqual(first_differences(graph[batch], eager[batch]), {}, f"batch of {batch}")

    def test_graphs_with_the_default_selection_answer_like_eager_runs(self):
        """While the indexers select all tokens. After that, two eager runs with this selection differ, too."""
        for keys in KEYS:
            with self.subTest(keys=keys):
                graph, eager = self.of(keys, "default selection").outputs, self.of(keys, "eager").outputs
                for batch, tokens in TOKENS.items():
                    differ = first_differences(graph[batch], eager[batch])
                    self.assertEqual([prompt for prompt in differ if selects_all(prompt, tokens)], [], differ)

    def test_answers_differ_from_each_other(self):
        """Otherwise the comparison above would say nothing."""
        for keys in KEYS:
            with self.subTest(keys=keys):
                for batch, rows in self.of(keys, "eager").outputs.items():
                    self.assertEqual(len({tuple(row) for row in rows}), batch)

    def test_the_instruments_are_silent_with_the_guard(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                for name in ("graph", "default selection"):
                    self.assertEqual(self.of(keys, name).reports, [])
                    report = self.report(keys, name)
                    self.assertEqual(report["distinct"], [])
                    self.assertGreaterEqual(report["streams"], 3)
                self.assertEqual(self.of(keys, "probe").reports, [])

    def test_the_detector_reports_what_the_guard_repairs(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                self.of(keys, "unguarded")
                report = self.report(keys, "unguarded")
                self.assertGreater(report["races"], 0)

    def test_the_probe_finds_a_planted_fault(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                first = self.of(keys, "probe, planted").reports[0]
                self.assertRegex(
                    first, r"layers\.2\..*weights_proj: captured-wrong-from-right-inputs, rows \[0\]"
                )

    def test_the_canary_finds_a_planted_fault(self):
        for keys in KEYS:
            with self.subTest(keys=keys):
                reports = self.of(keys, "canary, planted").reports
                self.assertEqual(len(reports), 1, reports)
                self.assertRegex(reports[0], f"page {WriteToPage.page} of C4 index-K layer 1 changed")

    def test_a_query_dropped_before_the_join(self):
        """The worked example of docs/graph_safety.md: memory is reused without the guard, and not with it."""
        for guard, kinds in (("guarded", set()), ("unguarded", {"allocation-reuse", "live-conflict"})):
            with self.subTest(guard):
                self.of("bf16", f"dropped, {guard}")
                report = self.report("bf16", f"dropped, {guard}")
                self.assertEqual({race["kind"] for race in report["distinct"]}, kinds)
        first = self.of("bf16", "dropped, probe").reports[0]
        self.assertRegex(first, "step 1, .*ddtree_index_logits: inputs-already-wrong, rows")


if __name__ == "__main__":
    unittest.main()
