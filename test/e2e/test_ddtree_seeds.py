"""A seed decides a sampled answer, whatever else is in the batch and however wide the trees are."""

import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from support.cases import DDTreeCase
from support.processes import run_engine
from support.prompts import PROMPTS
from support.sampling import SamplingChecks

register_cpu_ci(est_time=90, suite="e2e")

LENGTH = 12
OPTIONS = (
    dict(temperature=1.0),
    dict(temperature=2.0, top_p=0.8),
    dict(temperature=1.5, top_k=6, min_p=0.05),
    dict(temperature=1.5, min_p=0.1, frequency_penalty=0.5),
)


def submit(engine, seed, options):
    return engine.submit(PROMPTS[1], max_new_tokens=LENGTH, ignore_eos=True, sampling_seed=seed, **options)


def answers(engine, requests):
    return [list(request.output_ids)[:LENGTH] for request in engine.finish(requests)]


def alone_and_together(engine):
    """Return the answers to four seeded requests, each alone and then all in one batch with unseeded ones."""
    jobs = [(seed, options) for seed, options in zip((7, -(2**63), 2**63 - 1, 0), OPTIONS)]
    alone = [answers(engine, [submit(engine, *job)])[0] for job in jobs]
    crowd = [submit(engine, *job) for job in jobs]
    crowd += [submit(engine, None, OPTIONS[1]) for _ in range(3)]
    crowd.append(submit(engine, None, dict(temperature=0)))
    together = answers(engine, crowd)
    return alone, together[: len(jobs)], together[len(jobs) : -1]


def sample_with_seeds(engine, prompt, count, options):
    """The first three tokens of `count` answers to one prompt, each with its own seed."""
    requests = [
        engine.submit(prompt, max_new_tokens=3, ignore_eos=True, sampling_seed=seed, **options)
        for seed in range(count)
    ]
    return [list(request.output_ids)[:3] for request in engine.finish(requests)]


class TestSeeds(SamplingChecks, DDTreeCase):
    def check(self, **options):
        """The answers of many seeds have the exact distribution."""
        arguments = self.tree | {"speculative_num_draft_tokens": 24, "skip_tokenizer_init": False}
        found = run_engine(arguments, sample_with_seeds, self.prompt, self.count, options)
        self.assertLess(self.statistic(found, self.exact(**options)), 1.0)

    test_power = None  # SamplingChecks' own

    def test_the_batch_and_the_trees_do_not_matter(self):
        alone, together, unseeded = run_engine(self.tree, alone_and_together)
        self.assertEqual(together, alone)
        self.assertEqual(len({tuple(answer) for answer in unseeded}), len(unseeded))
        narrow = self.tree | {"speculative_num_draft_tokens": 3, "page_size": 16}
        self.assertEqual(run_engine(narrow, alone_and_together)[:2], (alone, alone))


if __name__ == "__main__":
    unittest.main()
