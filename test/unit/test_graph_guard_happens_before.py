"""The happens-before engine on every kind of trace it must judge, and on random traces against brute force."""

import unittest

from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.graph_guard.happens_before import (
    DROPPED_WAIT,
    LIVE,
    REUSE,
    HappensBefore,
    Region,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit")

MAIN, SIDE, THIRD = "main", "side", "third"
A = Region(4096, 1024)


class Trace(HappensBefore):
    """Shorthand over the engine."""

    def fork(self, source, target):
        self.record((source, target), source)
        self.wait((source, target), target)

    def use(self, stream, name, region=A):
        return self.op(stream, reads=[region], name=name)

    def make(self, stream, name, region=A):
        self.alloc(region.start, region.nbytes, stream)
        return self.op(stream, writes=[region], name=name)

    def found(self):
        return [(r.kind, r.first.name, r.second.name) for r in self.races]


class PatternTest(unittest.TestCase):
    def pattern_a(self, keep=False, ordered=False):
        t = Trace()
        t.capture_begin(MAIN)
        t.make(MAIN, "q")
        t.fork(MAIN, SIDE)
        t.use(SIDE, "read q")
        if ordered:
            t.fork(SIDE, MAIN)
        if not keep:
            t.free(A.start)
        t.make(MAIN, "y", Region(8192, 1024) if keep else A)
        t.fork(SIDE, MAIN)
        t.capture_end()
        return t

    def test_a_naive(self):
        race = self.pattern_a().races[0]
        self.assertEqual((race.kind, race.first.name, race.second.name), (REUSE, "read q", "y"))
        self.assertEqual((race.first_writes, race.second_writes), (False, True))
        self.assertEqual(race.allocations, ((1024, MAIN), (1024, MAIN)))

    def test_a_fixed(self):
        self.assertEqual(self.pattern_a(keep=True).races, [])
        self.assertEqual(self.pattern_a(ordered=True).races, [])

    def pattern_b(self, wait):
        t = Trace()
        t.capture_begin(MAIN)
        t.fork(MAIN, SIDE)
        t.make(SIDE, "k")
        t.fork(SIDE, MAIN)
        t.fork(MAIN, SIDE)
        t.use(MAIN, "read k")
        t.free(A.start)
        if wait:
            t.fork(MAIN, SIDE)
        t.make(SIDE, "n")
        t.fork(SIDE, MAIN)
        t.capture_end()
        return t

    def test_b(self):
        self.assertEqual(self.pattern_b(wait=False).found(), [(REUSE, "read k", "n")])
        self.assertEqual(self.pattern_b(wait=True).races, [])

    def indexer(self, wait_after_read):
        """The DSA indexer: the side stream computes q and waits for the last time, the main stream reads q, then
        q_b_proj runs on the side stream."""
        t = Trace()
        t.capture_begin(MAIN)
        t.fork(MAIN, SIDE)
        t.make(SIDE, "wq_b")
        t.fork(SIDE, MAIN)
        t.fork(MAIN, SIDE)
        t.use(MAIN, "fused_q")
        t.op(SIDE, writes=[Region(1 << 20, 512)], name="store_k")
        if wait_after_read:
            t.fork(MAIN, SIDE)
        t.fork(SIDE, MAIN)
        t.free(A.start)
        t.op(MAIN, writes=[Region(1 << 21, 512)], name="topk")
        t.make(SIDE, "q_b_proj")
        t.fork(SIDE, MAIN)
        t.capture_end()
        return t

    def test_indexer(self):
        self.assertEqual(self.indexer(False).found(), [(REUSE, "fused_q", "q_b_proj")])
        self.assertEqual(self.indexer(True).races, [])

    def test_nested_forks_are_transitive(self):
        t = Trace()
        t.capture_begin(MAIN)
        t.make(MAIN, "q")
        t.fork(MAIN, SIDE)
        t.fork(SIDE, THIRD)
        t.use(THIRD, "read q")
        t.fork(THIRD, SIDE)
        t.free(A.start)
        t.make(SIDE, "ordered through side")
        t.make(MAIN, "not yet joined")
        self.assertEqual({s for _, _, s in t.found()}, {"not yet joined"})

    def test_event_recorded_again(self):
        for again, races in ((False, 1), (True, 0)):
            t = Trace()
            t.make(MAIN, "w0")
            t.record("e", MAIN)
            t.op(MAIN, writes=[A], name="w1")
            if again:
                t.record("e", MAIN)
            t.wait("e", SIDE)
            t.use(SIDE, "r")
            self.assertEqual(len(t.races), races)

    def test_wait_for_an_event_never_recorded_orders_nothing(self):
        t = Trace()
        t.make(MAIN, "w")
        t.wait("e", SIDE)
        t.use(SIDE, "r")
        self.assertEqual(t.found(), [(LIVE, "w", "r")])

    def test_split_block(self):
        """A freed block is handed out again in parts, one of which begins in the middle of the old block."""
        t = Trace()
        t.make(MAIN, "q", Region(4096, 4096))
        t.fork(MAIN, SIDE)
        t.use(SIDE, "read q", Region(4096, 4096))
        t.free(4096)
        t.make(MAIN, "part", Region(6144, 512))
        t.make(MAIN, "elsewhere", Region(16384, 512))
        self.assertEqual(t.found(), [(REUSE, "read q", "part")])

    def test_deferred_free(self):
        """The allocator holds a recorded block back. The next allocation is elsewhere, and reuse follows the join."""
        t = Trace()
        t.capture_begin(MAIN)
        t.make(MAIN, "q")
        t.fork(MAIN, SIDE)
        t.use(SIDE, "read q")
        t.free(A.start)
        t.make(MAIN, "y", Region(8192, 1024))
        t.fork(SIDE, MAIN)
        t.make(MAIN, "z")
        self.assertEqual(t.races, [])

    def test_reuse_across_a_capture_boundary(self):
        t = Trace()
        for name in ("large", "small"):
            t.capture_begin(MAIN)
            t.fork(MAIN, SIDE)
            t.make(SIDE, name)
            t.fork(SIDE, MAIN)
            t.capture_end()
            t.free(A.start)
        self.assertEqual(t.races, [])

    def test_side_stream_before_and_in_a_capture_are_two_threads(self):
        """Work that a break left on the side stream is not ordered before what the next segment captures there."""
        t = Trace()
        t.fork(MAIN, SIDE)
        t.make(SIDE, "in the break")
        t.capture_begin(MAIN)
        t.fork(MAIN, SIDE)
        t.use(SIDE, "in the segment")
        self.assertEqual(t.found(), [(LIVE, "in the break", "in the segment")])

    def test_a_capture_that_was_ordered_after_the_break(self):
        """The guard waits between the break and the segment, which orders every stream of the segment."""
        for stream in (MAIN, SIDE):
            t = Trace()
            t.fork(MAIN, SIDE)
            t.make(SIDE, "in the break")
            t.capture_begin(MAIN)
            t.fork(MAIN, SIDE)
            t.capture_follows(SIDE)
            t.wait_dropped(MAIN, SIDE)
            t.use(stream, "in the segment")
            self.assertEqual(t.found(), [], stream)

    def test_shared_workspace(self):
        t = Trace()
        t.alloc(A.start, A.nbytes, MAIN)
        t.fork(MAIN, SIDE)
        t.op(MAIN, writes=[A], name="gemm")
        t.op(SIDE, writes=[A], name="gemm on side")
        self.assertEqual(t.found(), [(LIVE, "gemm", "gemm on side")])

    def test_two_readers_do_not_race(self):
        t = Trace()
        t.make(MAIN, "w")
        t.fork(MAIN, SIDE)
        t.use(MAIN, "r0")
        t.use(SIDE, "r1")
        self.assertEqual(t.races, [])

    def test_dropped_wait(self):
        t = Trace()
        t.fork(MAIN, SIDE)
        t.op(SIDE, writes=[A], name="left by the break")
        t.capture_begin(MAIN)
        t.wait_dropped(MAIN, SIDE)
        self.assertEqual(t.found(), [(DROPPED_WAIT, "left by the break", "wait_stream")])
        t.capture_end()
        t.fork(SIDE, MAIN)
        t.capture_begin(MAIN)
        t.wait_dropped(MAIN, SIDE)
        self.assertEqual(len(t.races), 1)

    def test_a_host_synchronization_orders_everything_that_follows(self):
        for how in ({}, {"stream": SIDE}, {"event": "e"}):
            t = Trace()
            t.make(SIDE, "w")
            t.record("e", SIDE)
            t.synchronize(**how)
            t.use(MAIN, "r")
            self.assertEqual(t.races, [], how)

    def test_an_access_is_forgotten_only_when_a_later_one_covers_all_of_it(self):
        whole, rows = Region(4096, 1024), Region(4096, 1024, 256, 128)
        for later, at in ((Region(4096, 512), 4608), (Region(4608, 512), 4096), (rows, 4096 + 128)):
            t = Trace()
            t.op(MAIN, writes=[whole], name="w")
            t.op(MAIN, writes=[later], name="part")
            t.use(SIDE, "r", Region(at, 64))
            self.assertIn((LIVE, "w", "r"), t.found())

    def test_columns_of_one_matrix_are_disjoint(self):
        """The q and k parts of one fused projection are normalized on two streams."""
        q = Region(4096, 10 * 256 - 128, 256, 128)
        k = Region(4096 + 128, 10 * 256 - 128, 256, 128)
        overlapping = Region(4096 + 64, 10 * 256 - 128, 256, 128)
        for other, races in ((k, 0), (overlapping, 1)):
            t = Trace()
            t.op(MAIN, writes=[q], name="q norm")
            t.op(SIDE, writes=[other], name="k norm")
            self.assertEqual(len(t.races), races)


# Few operations over many addresses. If one operation raced with many others, a missed race would go unnoticed.
EVENTS = st.one_of(
    st.tuples(st.just("op"), st.integers(0, 2), st.integers(0, 12), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("record"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("sync"), st.integers(0, 2)),
)


class ReachabilityTest(unittest.TestCase):
    @settings(max_examples=500, deadline=None)
    @given(st.lists(EVENTS, max_size=14))
    def test_random_traces(self, trace):
        """The engine reports every racing operation, and only pairs that really race."""
        engine = HappensBefore()
        nodes = []  # (region, whether it writes) for an operation, None for an event or a wait
        before = []  # for each node, the indices of all nodes that happen before it
        program, recorded, host = {}, {}, set()

        def add(node, stream, extra=()):
            edges = {e for e in (program.get(stream), *extra) if e is not None}
            reach = set(edges).union(*(before[e] for e in edges), set())
            nodes.append(node)
            before.append(reach)
            program[stream] = len(nodes) - 1
            return len(nodes) - 1

        ops = []
        for event in trace:
            if event[0] == "op":
                _, stream, start, length, write = event
                region = Region(start, length)
                at = add((region, write), stream, host)
                ops.append(at)
                engine.op(stream, **{"writes" if write else "reads": [region]})
            elif event[0] == "record":
                recorded[event[1]] = add(None, event[2])
                engine.record(event[1], event[2])
            elif event[0] == "wait":
                add(None, event[2], [recorded.get(event[1])])
                engine.wait(event[1], event[2])
            else:
                host = host | {program[event[1]]} if event[1] in program else host
                engine.synchronize(stream=event[1])
        races = set()
        for j, later in enumerate(ops):
            for i, earlier in enumerate(ops[:j]):
                (a, aw), (b, bw) = nodes[earlier], nodes[later]
                if (aw or bw) and a.overlaps(b) and earlier not in before[later]:
                    races.add((i, j))
        reported = {(r.first.index, r.second.index) for r in engine.races}
        self.assertLessEqual(reported, races)
        self.assertEqual({j for _, j in reported}, {j for _, j in races})


if __name__ == "__main__":
    unittest.main()
