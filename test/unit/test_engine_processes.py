"""The processes in which other tests run their engines."""

import os
import time
import unittest
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci
from support import processes
from support.processes import EngineRanks, run_all, run_ranks

register_cpu_ci(est_time=30, suite="unit")

ARGUMENTS = {"tp_size": 2}


class Engine:
    """In place of an engine: knows its rank."""

    def __init__(self, rank, **arguments):
        self.rank = rank


def own_rank(engine):
    return engine.rank


def fail_on_rank_1(engine):
    if engine.rank == 1:
        raise ValueError("this rank has no tokens")
    wait_for_the_other_rank()


def die_on_rank_1(engine):
    if engine.rank == 1:
        os._exit(3)
    wait_for_the_other_rank()


def wait_for_the_other_rank(*_):
    while True:
        time.sleep(1)


class TestEngineRanks(unittest.TestCase):
    def setUp(self):
        # The children are forked, so they have it too.
        self.enterContext(mock.patch.object(processes, "Engine", Engine))

    def test_results_by_rank(self):
        self.assertEqual(run_ranks(ARGUMENTS, own_rank), [0, 1])

    def test_a_rank_that_fails_ends_the_others(self):
        for job, reason in ((fail_on_rank_1, "this rank has no tokens"), (die_on_rank_1, "exit code 3")):
            with self.subTest(job.__name__):
                ranks = EngineRanks(ARGUMENTS, job)
                with self.assertRaisesRegex(RuntimeError, f"(?s)rank 1 of 2 failed.*{reason}"):
                    ranks.result()
                self.assertFalse(any(process._process.is_alive() for process in ranks._ranks))

    def test_a_rank_that_hangs(self):
        ranks = EngineRanks(ARGUMENTS, wait_for_the_other_rank)
        with self.assertRaisesRegex(RuntimeError, r"ranks \[0, 1\] of 2 were killed"):
            ranks.result(1.0)
        self.assertFalse(any(process._process.is_alive() for process in ranks._ranks))

    def test_other_engines_still_run(self):
        starts = {
            "fails": lambda: EngineRanks(ARGUMENTS, fail_on_rank_1),
            "works": lambda: EngineRanks(ARGUMENTS, own_rank),
        }
        results = dict(run_all(starts, at_once=1, seconds=300))
        self.assertIsInstance(results["fails"], RuntimeError)
        self.assertEqual(results["works"], [0, 1])


if __name__ == "__main__":
    unittest.main()
