"""How the device's reports reach the budget: late, in order, and without times of what was no decode step."""

import unittest

import torch
from sglang.srt.speculative.ddtree.budget import Load
from sglang.srt.speculative.ddtree.expectation import FIXED_POINT, LATE, Expectation
from sglang.srt.speculative.ddtree.width_control import (
    FIRST_STEPS,
    READ_TOTALS_EVERY,
    REPORT_EVERY,
    WidthControl,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")

WIDTHS, LOAD = (1, 4, 8), Load(2, 100, 0)


class Budget:
    """Chooses what it is told to, and keeps what it is given."""

    def __init__(self):
        self.next, self.steps = 8, []

    def choose(self, load):
        return self.next

    def observe(self, step):
        self.steps.append(step)


class Event:
    """An event of a device that is idle or busy."""

    is_idle = False

    def query(self):
        return Event.is_idle

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 3.0


class TestWidthControl(CustomTestCase):
    def setUp(self):
        self.budget = Budget()
        self.expectation = Expectation(
            widths=WIDTHS, max_requests=4, block_size=3, num_candidates=2, device="cpu"
        )

    def control(self, refines_costs=True):
        return WidthControl(self.budget, self.expectation, refines_costs=refines_costs)

    def run_step(self, control, expected, emitted, width=8):
        """A step of two requests with these expected tokens at the widest N, and these emitted ones."""
        self.budget.next = width
        self.assertEqual(control.choose(LOAD), width)
        for row, (widest, tokens) in enumerate(zip(expected, emitted)):
            self.expectation.report[row] = torch.tensor([1.0, 1.5, widest, tokens])
        control.finish()

    def test_reports_are_read_late_and_in_order(self):
        control = self.control()
        for step in range(6):
            self.assertEqual(len(self.budget.steps), max(0, step - LATE))
            self.run_step(control, (step + 2, step + 4), (1, 3))
        for step, found in enumerate(self.budget.steps):
            self.assertEqual((found.load, found.width, found.emitted), (LOAD, 8, 2.0))
            self.assertEqual(found.expected, (1.0, 1.5, step + 3.0))
        # The first step has none before it.
        self.assertEqual([step.seconds is None for step in self.budget.steps], [True, False, False, False])
        self.assertTrue(all(step.seconds > 0 for step in self.budget.steps[1:]))

    def test_later_one_step_in_a_few_is_reported(self):
        control = self.control()
        for _ in range(FIRST_STEPS + 40):
            self.run_step(control, (2, 2), (1, 1))
        before = len(self.budget.steps)
        for _ in range(40):
            self.run_step(control, (2, 2), (1, 1))
        self.assertEqual(len(self.budget.steps) - before, 40 // REPORT_EVERY)
        self.assertTrue(all(step.seconds > 0 for step in self.budget.steps[1:]))

    def test_steps_after_a_change_are_reported(self):
        control = self.control()
        for _ in range(FIRST_STEPS + 40):
            self.run_step(control, (2, 2), (1, 1))
        for step in range(12):
            self.run_step(control, (2, 2), (1, 1), width=4 if step == 6 else 8)
        self.run_step(control, (2, 2), (1, 1))
        self.run_step(control, (2, 2), (1, 1))
        # the probe, and the four steps after it
        self.assertIn(
            [4, 8, 8, 8, 8],
            [[s.width for s in self.budget.steps[i : i + 5]] for i in range(len(self.budget.steps))],
        )

    def test_the_context_is_that_of_a_few_steps_ago_at_most(self):
        control = self.control()
        for step in range(20):
            load = control.load(torch.tensor([100 + step, 100 + step]), 300)
            self.assertEqual((load.bs, load.nodes_per_call), (2, 300))
            self.assertLess(abs(load.context - 2 * (100 + step)), 2 * REPORT_EVERY)
            control.choose(load)
            control.finish()
        self.assertEqual(control.load(torch.tensor([7]), 0), Load(1, 7, 0))

    def test_a_step_without_a_draft_reports_its_time_alone(self):
        control = self.control()
        for width in (8, 1, 8, 8):
            self.run_step(control, (3, 3), (2, 2), width)
        drafted, plain = self.budget.steps
        self.assertEqual((drafted.emitted, plain.expected, plain.emitted), (2.0, None, None))
        self.assertIsNotNone(plain.seconds)

    def test_a_prefill_in_between_is_not_timed(self):
        control = self.control()
        for step in range(6):
            if step == 2:
                control.interrupt()
            self.run_step(control, (3, 3), (2, 2))
        self.assertEqual([step.seconds is None for step in self.budget.steps], [True, False, True, False])

    def test_a_step_knows_whether_the_device_waited_for_it(self):
        control = self.control()
        control._on_card = control._sees_host = True
        for slot in control._slots:
            slot.end = Event()
        for idle in (True, False, True, True, False, False):
            Event.is_idle = idle
            self.run_step(control, (3, 3), (2, 2))
        self.assertEqual([step.host_bound for step in self.budget.steps], [False, False, True, True])
        self.assertEqual([step.seconds for step in self.budget.steps], [None, 3e-3, 3e-3, 3e-3])

    def test_a_late_step_after_one_of_another_width_is_not_timed(self):
        """Its time is the host's, less what the device took for the step before and more for this one."""
        control = self.control()
        control._on_card = control._sees_host = True
        for slot in control._slots:
            slot.end = Event()
        for width, idle in ((8, True), (8, True), (2, True), (2, True), (8, False), (8, True), (8, True)):
            Event.is_idle = idle
            self.run_step(control, (3, 3), (2, 2), width)
        self.assertEqual([step.seconds for step in self.budget.steps], [None, 3e-3, None, 3e-3, 3e-3])

    def test_without_overlap_no_step_tells_the_host_s_time(self):
        control = WidthControl(self.budget, self.expectation, refines_costs=True, overlaps=False)
        control._on_card = True  # then steps have events
        for slot in control._slots:
            slot.end = Event()
        Event.is_idle = True
        for _ in range(4):
            self.run_step(control, (3, 3), (2, 2))
        self.assertEqual([step.host_bound for step in self.budget.steps], [False, False])

    def test_a_step_after_a_change_of_the_batch_is_not_timed(self):
        """When requests end or join, the host has work that other steps do not have."""
        control = self.control()
        for requests in (2, 2, 1, 1, 1, 1):
            self.budget.next = 8
            control.choose(LOAD._replace(bs=requests))
            control.finish()
        self.assertEqual([step.seconds is None for step in self.budget.steps], [True, False, True, False])

    def test_several_ranks_use_no_times_of_their_own(self):
        control = self.control(refines_costs=False)
        for _ in range(5):
            self.run_step(control, (3, 3), (2, 2))
        self.assertEqual({step.seconds for step in self.budget.steps}, {None})

    def test_counts_become_factors(self):
        control = self.control()
        for step in range(READ_TOTALS_EVERY + LATE + 1):
            if step == READ_TOTALS_EVERY - 1:
                self.expectation.totals[0, 0, 0] = 400 * FIXED_POINT
                self.expectation.totals[1, 0, 0] = 200
                self.assertEqual(self.expectation.factors.unique().tolist(), [1.0])
            self.run_step(control, (3, 3), (2, 2))
        factors = self.expectation.factors
        self.assertAlmostEqual(float(factors[0, 0]), 0.5, delta=0.01)
        self.assertAlmostEqual(float(factors[1, 0]), 0.5, delta=0.01, msg="of the same rank")
        self.assertEqual(float(factors[0, 1]), 1.0)


if __name__ == "__main__":
    unittest.main()
