"""The server arguments of the instruments, and how ``guard_capture`` wraps a forward."""

import argparse
import sys
import tempfile
import unittest
from importlib.metadata import entry_points
from types import SimpleNamespace
from unittest import mock

from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.model_executor import graph_guard
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.graph_guard import arguments
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import ArgumentsCase

register_cpu_ci(est_time=25, suite="unit")


INSTRUMENTS = {"debug_graph_races": "r.json", "debug_graph_diff": "layers", "debug_graph_canary": 8}
OFF = dict.fromkeys(INSTRUMENTS)


def flags(**values):
    return SimpleNamespace(graph=SimpleNamespace(**{**OFF, **values}))


def server_args(**values):
    usual = {"enable_hierarchical_cache": False, "enable_hisparse": False, "disaggregation_mode": "null"}
    return SimpleNamespace(
        **{"device": "cuda", "cuda_graph_config": graphs("full"), **OFF, **usual, **values}
    )


def graphs(decode, prefill="disabled"):
    return CudaGraphConfig(PhaseConfig(decode), PhaseConfig(prefill))


class ArgumentsTest(unittest.TestCase):
    def test_server_arguments(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        text = "--model-path x --debug-graph-races r.json --debug-graph-diff layers --debug-graph-canary 8"
        args = parser.parse_args(text.split())
        self.assertEqual(
            (args.debug_graph_races, args.debug_graph_diff, args.debug_graph_canary), ("r.json", "layers", 8)
        )
        args = parser.parse_args(["--model-path", "x"])
        self.assertEqual(
            (args.debug_graph_races, args.debug_graph_diff, args.debug_graph_canary), (None, None, None)
        )

    def test_all_off_returns_the_same_function(self):
        forward = lambda: 1  # noqa: E731
        with mock.patch("sglang.srt.runtime_context.get_exec", flags):
            with mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD="0"):
                self.assertIs(graph_guard.guard_capture(forward, object(), 4), forward)

    def test_on_by_default_and_transparent_outside_a_capture(self):
        with (
            mock.patch("sglang.srt.runtime_context.get_exec", flags),
            mock.patch.object(graph_guard, "enable_record_stream_reuse", return_value=True) as reuse,
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        ):
            guarded = graph_guard.guard_capture(lambda: "out", object(), 4)
            self.assertEqual(guarded(), "out")
        reuse.assert_called_once_with()

    def test_probe_and_canary_are_attached_once(self):
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=None), raw_num_tokens=0)
        backend = SimpleNamespace(_cuda_graph_runner=runner, replay=lambda key, batch: "out")
        with (
            mock.patch("sglang.srt.runtime_context.get_exec", lambda: flags(debug_graph_diff="aten::mm")),
            mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD="0"),
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        ):
            for key in (8, 4):
                graph_guard.guard_capture(lambda: None, backend, key)()
            replay = backend.replay
            graph_guard.guard_capture(lambda: None, backend, 2)()
            self.assertIs(backend.replay, replay)
            self.assertEqual(backend.replay(4, SimpleNamespace(batch_size=3)), "out")
        self.assertEqual(backend._graph_diff.steps, 1)

    def test_a_segment_lasts_until_the_next_one_opens(self):
        """The segment number counts breaks, so the work of a break belongs to the segment before it."""
        graph = SimpleNamespace(_segments=[object()], _break_fns=[])
        module = SimpleNamespace(
            _current_capture_var=SimpleNamespace(get=lambda: SimpleNamespace(cuda_graph=graph))
        )
        with mock.patch.dict(sys.modules, {graph_guard._BREAKABLE: module}):
            capture = graph_guard._stream_safe_capture()
        self.assertEqual(capture._segment(), 0)
        graph._break_fns.append(object())
        self.assertEqual(capture._segment(), 1)

    def test_each_replica_writes_its_own_report(self):
        self.assertEqual(graph_guard._path_of_rank("a/races.json"), "a/races.json")
        parallel = SimpleNamespace(dp_rank=3)
        with mock.patch("sglang.srt.runtime_context.get_parallel", lambda: parallel):
            self.assertEqual(graph_guard._path_of_rank("a/races.json"), "a/races.dp3.json")

    def test_each_rank_writes_its_own_report(self):
        distributed = graph_guard.torch.distributed
        with mock.patch.object(distributed, "is_initialized", return_value=True):
            with mock.patch.object(distributed, "get_world_size", return_value=1):
                self.assertEqual(graph_guard._path_of_rank("a/races.json"), "a/races.json")
            with (
                mock.patch.object(distributed, "get_world_size", return_value=4),
                mock.patch.object(distributed, "get_rank", return_value=2),
            ):
                self.assertEqual(graph_guard._path_of_rank("a/races.json"), "a/races.rank2.json")

    def test_canary_leaves_draft_workers_alone(self):
        backend = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=True))
        with mock.patch("sglang.srt.runtime_context.get_exec", lambda: flags(debug_graph_canary=4)):
            with mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD="0"):
                graph_guard.guard_capture(lambda: None, backend, 4)
        self.assertNotIn("_page_canary", vars(backend.model_runner))

    def test_canary_of_a_graph_without_a_runner(self):
        """Upstream captures its row-bucket graphs in the middle of a forward."""
        with mock.patch("sglang.srt.runtime_context.get_exec", lambda: flags(debug_graph_canary=4)):
            with mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD="0"):
                forward = lambda: None  # noqa: E731
                self.assertIs(graph_guard.guard_capture(forward, object(), 4), forward)

    def test_the_canary_checks_its_arguments_also_without_the_plugin(self):
        backend = SimpleNamespace(model_runner=SimpleNamespace())
        with (
            mock.patch("sglang.srt.runtime_context.get_exec", lambda: flags(debug_graph_canary=0)),
            mock.patch("sglang.srt.runtime_context.get_server_args", server_args),
            self.assertRaisesRegex(ArgumentRefused, "--debug-graph-canary: expected 1 or more, got 0"),
        ):
            graph_guard.guard_capture(lambda: None, backend, 4)


class RefusalsTest(ArgumentsCase):
    def refused(self, **values):
        """Return why a server with these arguments is refused."""
        with self.assertRaises(ArgumentRefused) as caught:
            arguments.refuse_server_args(server_args(**values))
        return str(caught.exception)

    def test_what_is_served(self):
        arguments.refuse_server_args(server_args())
        arguments.refuse_server_args(server_args(device="cpu"))
        with tempfile.TemporaryDirectory() as folder:
            arguments.refuse_server_args(
                server_args(
                    debug_graph_races=f"{folder}/r.json", debug_graph_diff="layers", debug_graph_canary=1
                )
            )

    def test_a_device_without_cuda_graphs(self):
        for field, value in INSTRUMENTS.items():
            flag = "--" + field.replace("_", "-")
            self.assertIn(
                f"{flag}: --device: expected 'cuda', got 'cpu'", self.refused(device="cpu", **{field: value})
            )

    def test_graphs_that_are_disabled(self):
        for field, value in INSTRUMENTS.items():
            said = self.refused(cuda_graph_config=graphs("disabled"), **{field: value})
            self.assertIn(f"--{field.replace('_', '-')}: expected a server with CUDA graphs, got", said)
        for config in (graphs("full", "disabled"), graphs("disabled", "breakable")):
            arguments.refuse_server_args(server_args(debug_graph_diff="layers", cuda_graph_config=config))

    def test_values(self):
        self.assertIn(
            "a folder that exists, got '/nowhere/r.json'", self.refused(debug_graph_races="/nowhere/r.json")
        )
        self.assertIn(
            "--debug-graph-diff: expected a regular expression, got '('", self.refused(debug_graph_diff="(")
        )
        self.assertIn("--debug-graph-canary: expected 1 or more, got -1", self.refused(debug_graph_canary=-1))

    def test_the_canary_refuses_features_that_fill_pools_in_other_ways(self):
        for field, value in (
            ("enable_hierarchical_cache", True), ("enable_hisparse", True), ("disaggregation_mode", "decode"),
        ):  # fmt: skip
            said = self.refused(debug_graph_canary=4, **{field: value})
            self.assertRegex(
                said, f"--debug-graph-canary: --{field.replace('_', '-')}: expected .*, got {value!r}"
            )

    def test_they_are_checked_before_anything_is_loaded(self):
        (found,) = entry_points(group="sglang.srt.plugins", name="graph_guard_arguments")
        self.assertIs(found.load(), arguments.register)
        with self.assertRaisesRegex(
            ArgumentRefused, "--debug-graph-diff: --device: expected 'cuda', got 'cpu'"
        ):
            self.resolve(debug_graph_diff="layers")
        with self.assertRaisesRegex(
            ArgumentRefused, "--debug-graph-races: expected a server with CUDA graphs, got one"
        ):
            self.resolve(
                device="cuda", attention_backend="triton", debug_graph_races="r.json", disable_cuda_graph=True,
                speculative_algorithm=None, speculative_draft_model_path=None,
            )  # fmt: skip
        self.resolve(
            device="cuda", attention_backend="triton", debug_graph_races="r.json",
            speculative_algorithm=None, speculative_draft_model_path=None,
        )  # fmt: skip


if __name__ == "__main__":
    unittest.main()
