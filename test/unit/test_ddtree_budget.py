"""The budget on a simulated card: what it converges to, and how fast."""

import math
import random
import unittest

from sglang.srt.speculative.ddtree.budget import Budget, Load, Step, StepCosts, widths_up_to
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.expectation import LATE
from sglang.srt.speculative.ddtree.width_control import CHANGED_STEPS, FIRST_STEPS, REPORT_EVERY
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

WIDTHS = widths_up_to(64, 12)
BATCHES = (1, 2, 4, 8, 16, 32)


def card(bs, width):
    """Milliseconds of a step: like an 8B model on an H200. It is bound by bandwidth, then by arithmetic."""
    draft = 0.0 if width == 1 else 0.9
    return 4.9 + draft + max(0.0, bs * width - 40) * 0.021 + 0.02 * bs


TABLE = {(bs, width): (1e-3 * card(bs, width), 1e-8) for bs in BATCHES for width in WIDTHS}


def small_card(bs, width):
    """Milliseconds of a step: like a model of 135M on an H200. The host needs as long as the narrow ones."""
    return 0.7 + (0.6 if width > 1 else 0.0) + max(0, bs * width - 256) * 0.0008


SMALL_TABLE = {(bs, width): (1e-3 * small_card(bs, width), 0.0) for bs in BATCHES for width in WIDTHS}


class Simulation:
    """A server: a card with its own times, and a drafter whose probabilities may be too high or too low.

    Args:
        table: times that the budget starts from; None: it measured none.
        kept: accepted nodes over those that the drafter's probabilities expect.
        noise: spread of times and accept lengths.
        card: (bs, width) -> milliseconds of the device.
        host: milliseconds of the host, of a step with a draft that calls the sampler once.
        nodes_per_call: nodes that one call of the sampler takes; 0: all requests are greedy.
        call: what each further call adds to the host's time, as a part of it.
    """

    def __init__(
        self, table=TABLE, *, kept=1.0, noise=0.03, probes=True, card=card, host=0.0, nodes_per_call=0,
        call=0.15,
    ):  # fmt: skip
        self.card, self.host, self.nodes_per_call, self.call = card, host, nodes_per_call, call
        self.costs = StepCosts(WIDTHS, BATCHES, table and dict(table))
        self.budget = Budget(self.costs, probes=probes)
        self.kept, self.noise = kept, noise
        self.slower = 1.0  # of steps with a draft
        self.random = random.Random(1)
        self.pending, self.log = [], []
        self.steps, self.last, self.same = 0, None, 0

    def drafted(self, width):
        return 1.0 + 1.9 * (1.0 - width**-0.45)

    def emitted(self, width):
        return 1.0 + self.kept * (self.drafted(width) - 1.0)

    def seconds(self, bs, width):
        return max(self.of_device(bs, width), self.of_host(bs, width))

    def of_device(self, bs, width):
        return 1e-3 * self.card(bs, width) * (self.slower if width > 1 else 1.0)

    def of_host(self, bs, width):
        calls = math.ceil(bs * width / self.nodes_per_call) if self.nodes_per_call else 1
        return 1e-3 * self.host * (1.0 + self.call * (calls - 1) if width > 1 else 0.75)

    def load(self, bs, context=2000):
        return Load(bs, bs * context, self.nodes_per_call)

    def rate(self, bs, width):
        return bs * self.emitted(width) / self.seconds(bs, width)

    def best(self, bs):
        return max(self.rate(bs, width) for width in WIDTHS)

    def run(self, bs, steps, context=2000):
        """Runs steps; returns the widths chosen."""
        widths = []
        for _ in range(steps):
            while len(self.pending) >= LATE:
                step = self.pending.pop(0)
                if step is not None:
                    self.budget.observe(step)
                    self.log.append(step)
            load = self.load(bs, context)
            width = self.budget.choose(load)
            self.log.append((load, width))
            widths.append(width)
            noisy = lambda value: value * (1.0 + self.noise * self.random.gauss(0, 1))  # noqa: E731
            expected = emitted = None
            if width > 1:
                expected = tuple(noisy(self.drafted(n)) if n > 1 else 1.0 for n in WIDTHS)
                # Accepted nodes vary by 0.8 per request, and cannot be fewer than none.
                nodes = self.emitted(width) - 1.0
                shape = bs * (nodes / 0.8) ** 2
                emitted = 1.0 + nodes * self.random.gammavariate(shape, 1.0 / shape)
            device, host = noisy(self.of_device(bs, width)), noisy(self.of_host(bs, width))
            step = Step(load, width, max(device, host), expected, emitted, host > device)
            self.pending.append(step if self.is_reported(bs, width) else None)
        return widths

    def is_reported(self, bs, width):
        """As WidthControl decides it."""
        self.steps += 1
        self.same = self.same + 1 if (bs, width) == self.last else 0
        self.last = bs, width
        return self.steps <= FIRST_STEPS or self.same < CHANGED_STEPS or self.steps % REPORT_EVERY == 0

    def efficiency(self, bs, widths):
        """Tokens per second of these steps, over those of the best single width."""
        tokens = sum(bs * self.emitted(width) for width in widths)
        return tokens / sum(self.seconds(bs, width) for width in widths) / self.best(bs)


class TestBudget(CustomTestCase):
    def test_it_is_as_fast_as_the_best_width(self):
        for bs in BATCHES:
            for kept in (0.2, 0.6, 1.0, 1.3):
                with self.subTest(bs=bs, kept=kept):
                    server = Simulation(kept=kept)
                    server.run(bs, 200)
                    self.assertGreater(server.efficiency(bs, server.run(bs, 1500)), 0.98)

    def test_probes_of_much_worse_widths_are_rare(self):
        """At these batch sizes a wide verify takes several times as long as a narrow one."""
        for bs in (16, 32):
            for kept in (0.2, 1.0):
                with self.subTest(bs=bs, kept=kept):
                    server = Simulation(kept=kept)
                    server.run(bs, 200)
                    self.assertGreater(server.efficiency(bs, server.run(bs, 1000)), 0.995)

    def test_width_1_still_asks_the_drafter(self):
        """Its steps draft nothing, so only probes can show that a drafter has become worth its time."""
        server = Simulation(kept=0.2)
        widths = server.run(32, 800)
        self.assertEqual(max(set(widths), key=widths.count), 1)
        self.assertGreater(sum(width > 1 for width in widths[200:]), 3)
        server.kept = 2.0
        server.run(32, 1200)
        self.assertGreater(server.efficiency(32, server.run(32, 100)), 0.9)

    def test_wrong_times_are_corrected_within_200_steps(self):
        generator = random.Random(7)
        for trial in range(12):
            table = {
                key: (fixed * generator.choice((0.3, 0.6, 1.0, 1.7, 3.0)), slope)
                for key, (fixed, slope) in TABLE.items()
            }
            for bs in (1, 8, 32):
                with self.subTest(trial=trial, bs=bs):
                    server = Simulation(table)
                    server.run(bs, 200)
                    self.assertGreater(server.efficiency(bs, server.run(bs, 300)), 0.95)
                    self.assertGreater(server.rate(bs, self.present(server, bs)) / server.best(bs), 0.97)

    def present(self, server, bs):
        """The choice without probes."""
        load = server.load(bs)
        return max(WIDTHS, key=lambda width: server.budget.rate(load, width))

    def test_without_times_it_finds_them_within_200_steps(self):
        for bs in (1, 4, 32):
            with self.subTest(bs=bs):
                server = Simulation(None)
                server.run(bs, 200)
                self.assertGreater(server.rate(bs, self.present(server, bs)) / server.best(bs), 0.97)

    def test_wrong_probabilities_are_corrected_within_200_steps(self):
        """The drafter's probabilities expect five times the nodes that the target accepts."""
        server = Simulation(kept=0.2)
        server.run(1, 200)
        self.assertGreater(server.rate(1, self.present(server, 1)) / server.best(1), 0.97)

    def test_a_change_of_load_settles_within_20_steps(self):
        server = Simulation(probes=False)
        server.run(1, 300)
        for bs in (32, 1, 16, 32, 1):
            server.run(bs, 20)
            widths = server.run(bs, 30)
            with self.subTest(bs=bs):
                self.assertGreater(server.efficiency(bs, widths), 0.98)
                self.assertLessEqual(sum(a != b for a, b in zip(widths, widths[1:])), 2)

    def test_it_does_not_flutter(self):
        server = Simulation(probes=False, noise=0.05)
        server.run(8, 200)
        widths = server.run(8, 1000)
        self.assertLess(sum(a != b for a, b in zip(widths, widths[1:])), 60)

    def test_probes_become_rare(self):
        server = Simulation()
        server.run(4, 2000)
        widths = server.run(4, 1000)
        worse = sum(server.rate(4, width) < 0.95 * server.best(4) for width in widths)
        self.assertLess(worse, 30)
        self.assertGreater(len(set(widths)), 2, "no other width is tried any more")

    def test_the_same_reports_give_the_same_choices(self):
        server = Simulation(noise=0.1)
        for bs in (1, 32, 4, 1):
            server.run(bs, 150)
        replay = Budget(StepCosts(WIDTHS, BATCHES, dict(TABLE)))
        choices = 0
        for event in server.log:
            if isinstance(event, Step):
                replay.observe(event)
            else:
                load, width = event
                self.assertEqual(replay.choose(load), width)
                choices += 1
        self.assertEqual(choices, 600)

    def test_one_late_answer_is_no_reason_to_change(self):
        """A step after a pause of the server seems to take a second."""
        server = Simulation(probes=False, noise=0.0)
        before = server.run(4, 100)[-1]
        load = Load(4, 8000, 0)
        server.budget.observe(Step(load, before, 1.0, None, None))
        self.assertEqual(server.run(4, 1), [before])

    def test_late_steps_change_little(self):
        """One step in 30 is late, by a little or by much."""
        for bs in BATCHES:
            for factor in (1.6, 2.5, 10.0):
                with self.subTest(bs=bs, factor=factor):
                    server, widths = Simulation(), []
                    server.run(bs, 300)
                    for _ in range(20):
                        widths += server.run(bs, 30)
                        if (late := server.pending[-1]) is not None:
                            server.pending[-1] = late._replace(seconds=factor * late.seconds)
                    self.assertGreater(server.efficiency(bs, widths), 0.98)

    def test_a_late_host_changes_little(self):
        """The device bounds all steps but one, before which the host was away."""
        for bs in BATCHES:
            for factor in (1.6, 2.5, 10.0):
                with self.subTest(bs=bs, factor=factor):
                    server = Simulation(probes=False)
                    server.run(bs, 200)
                    late = server.pending[-1]
                    server.pending[-1] = late._replace(seconds=factor * late.seconds, host_bound=True)
                    self.assertGreater(server.efficiency(bs, server.run(bs, 20)), 0.97)

    def test_times_that_stay_longer_are_learned(self):
        """The card slows down, for all widths but the narrowest."""
        for factor in (1.6, 3.0):
            with self.subTest(factor=factor):
                server = Simulation()
                server.run(4, 300)
                server.slower = factor
                server.run(4, 200)
                self.assertGreater(server.rate(4, self.present(server, 4)) / server.best(4), 0.97)

    def test_a_host_that_becomes_slower_and_faster_again(self):
        """A slow host makes wide trees cheap. Its time, seen at one width, holds for the others."""
        for bs in BATCHES:
            for kept in (0.5, 1.0):
                server = Simulation(SMALL_TABLE, card=small_card, host=1.4, kept=kept)
                server.run(bs, 300)
                for host in (2.1, 1.4, 1.9, 1.2, 1.4):
                    with self.subTest(bs=bs, kept=kept, host=host):
                        server.host = host
                        self.assertGreater(server.efficiency(bs, server.run(bs, 300)), 0.92, "at the change")
                        self.assertGreater(server.efficiency(bs, server.run(bs, 300)), 0.97)

    def test_each_call_of_the_sampler_costs_the_host_time(self):
        for bs in (8, 16, 32):
            for call in (0.08, 0.15, 0.25):
                for kept in (0.5, 1.0):
                    server = Simulation(SMALL_TABLE, card=small_card, host=2.0, kept=kept, nodes_per_call=100,
                                        call=call)  # fmt: skip
                    for host in (2.0, 2.8, 1.8):
                        with self.subTest(bs=bs, call=call, kept=kept, host=host):
                            server.host = host
                            server.run(bs, 300)
                            self.assertGreater(server.efficiency(bs, server.run(bs, 300)), 0.93)

    def test_a_slow_host_is_no_reason_to_draft_nothing(self):
        """Without a draft the host has less to do, and what is known of that gets old."""
        costs = StepCosts(WIDTHS, BATCHES, dict(SMALL_TABLE))
        load = Load(4, 0, 0)
        for seconds in (1e-3, *[2e-3] * 30):
            costs.observe(load, 1, 0.75 * seconds, True)
            costs.observe(load, 16, seconds, True)
        self.assertAlmostEqual(costs.seconds(load, 32), 2e-3, delta=2e-4)
        for _ in range(60):
            costs.observe(load, 16, 6e-3, True)
        self.assertGreater(costs.seconds(load, 1), 3e-3)
        self.assertGreater(costs.seconds(load, 64), 5e-3)

    def test_the_device_bounds_what_the_host_needs(self):
        costs = StepCosts(WIDTHS, BATCHES, dict(SMALL_TABLE))
        load = Load(32, 0, 0)
        for _ in range(10):
            costs.observe(load, 8, 4e-3, True)
        self.assertAlmostEqual(costs.seconds(load, 16), 4e-3)
        for _ in range(10):
            costs.observe(load, 48, costs.table[32, 48][0], False)
        self.assertLessEqual(costs.seconds(load, 16), costs.table[32, 48][0])
        self.assertAlmostEqual(costs.seconds(load, 64), costs.table[32, 64][0])

    def test_sampling_has_its_own_times(self):
        greedy, sampled = Load(4, 0, 0), Load(4, 0, 100)
        costs = StepCosts(WIDTHS, BATCHES, dict(TABLE))
        before = costs.seconds(greedy, 16)
        for _ in range(20):
            costs.observe(greedy, 16, before)
            costs.observe(sampled, 16, 2 * before)
        self.assertAlmostEqual(costs.seconds(greedy, 16), before)
        self.assertAlmostEqual(costs.seconds(sampled, 16), 2 * before)
        self.assertAlmostEqual(costs.seconds(sampled, 24), 2 * costs.seconds(greedy, 24))

    def test_batches_between_and_beyond_the_graphs(self):
        costs = StepCosts(WIDTHS, BATCHES, dict(TABLE))
        self.assertEqual(costs.seconds(Load(5, 0, 0), 16), costs.seconds(Load(8, 0, 0), 16))
        self.assertAlmostEqual(costs.seconds(Load(64, 0, 0), 16), 2 * costs.seconds(Load(32, 0, 0), 16))
        self.assertGreater(costs.seconds(Load(5, 100_000, 0), 16), costs.seconds(Load(5, 0, 0), 16))

    def test_widths(self):
        self.assertEqual(widths_up_to(64, 12), (1, 4, 8, 12, 16, 24, 32, 48, 64))
        self.assertEqual(widths_up_to(64, 16), (1, 4, 8, 16, 24, 32, 48, 64))
        self.assertEqual(widths_up_to(20, 8), (1, 4, 8, 16, 20))
        self.assertEqual(widths_up_to(2, 2), (1, 2))
        self.assertEqual(widths_up_to(130, 8), (1, 4, 8, 16, 24, 32, 48, 64, 130))


class TestCalibration(CustomTestCase):
    """A drafter of depth 4 with 3 candidates. The target accepts a node at (depth, rank) this often."""

    SHARES = [[0.5, 1.4, 0.9], [0.4, 1.0, 1.2], [0.3, 0.8, 1.0], [0.2, 0.6, 1.1]]

    def test_it_converges_within_200_steps(self):
        generator, calibration = random.Random(3), Calibration(4, 3)
        expected, accepted = [0.0] * 12, [0.0] * 12
        for step in range(200):
            for depth in range(4):
                probabilities = (0.5, 0.2, 0.1)
                draw, found = generator.random(), None
                for rank, probability in enumerate(probabilities):
                    expected[3 * depth + rank] += probability
                    draw -= probability * self.SHARES[depth][rank]
                    if draw < 0 and found is None:
                        found = rank
                if found is None:
                    break
                accepted[3 * depth + found] += 1
            if step % 16 == 15:
                factors = calibration.read(expected + accepted)
        drafted = kept = 1.0
        tokens = [1.0, 1.0]
        for depth in range(4):
            drafted *= sum(p * f for p, f in zip((0.5, 0.2, 0.1), factors[3 * depth : 3 * depth + 3]))
            kept *= sum(p * share for p, share in zip((0.5, 0.2, 0.1), self.SHARES[depth]))
            tokens = [tokens[0] + drafted, tokens[1] + kept]
        self.assertLess(abs(tokens[0] / tokens[1] - 1.0), 0.08)
        self.assertLess(factors[0], 0.75)
        self.assertGreater(factors[1], 0.9)

    def test_without_evidence_it_changes_nothing(self):
        self.assertEqual(Calibration(2, 2).read([0.0] * 8), [1.0] * 4)

    def test_little_evidence_follows_the_rank(self):
        """Of rank 0, half of what was expected is accepted at depth 1. Nothing is known of depth 2."""
        factors = Calibration(2, 2).read([1000.0, 0.0, 0.0, 0.0, 500.0, 0.0, 0.0, 0.0])
        self.assertAlmostEqual(factors[0], 0.5, delta=0.01)
        self.assertAlmostEqual(factors[2], 0.5, delta=0.01)
        self.assertEqual((factors[1], factors[3]), (1.0, 1.0))

    def test_it_forgets(self):
        calibration, totals = Calibration(1, 1), [0.0, 0.0]
        for share in (0.5, 1.5):
            for _ in range(300):
                totals = [totals[0] + 10.0, totals[1] + 10.0 * share]
                (factor,) = calibration.read(totals)
            self.assertAlmostEqual(factor, share, delta=0.02)


if __name__ == "__main__":
    unittest.main()
