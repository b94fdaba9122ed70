"""Mixed load on DDTREE: nothing crashes, no KV slot leaks, greedy answers equal plain decoding's."""

import random
import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.models import write_models_for
from support.processes import run_engine

register_cpu_ci(est_time=90, suite="e2e")

REQUESTS = 120
REGEX = r"\[[01](,[01])*\]"


def schedule(seed: int) -> list[dict]:
    """Plan requests of every kind. Arrival and abort are turns of the event loop (abort: or None)."""
    draw = random.Random(seed)
    planned = []
    for _ in range(REQUESTS):
        options = {"max_new_tokens": draw.choice([1, 2, 7, 30, 60]), "temperature": draw.choice([0, 0, 1.0])}
        kind = draw.random()
        if kind < 0.2:
            options["regex"] = REGEX
        elif kind < 0.4:
            options["stop_token_ids"] = [draw.randrange(3, 16)]
        else:
            options["ignore_eos"] = True
        if options["temperature"]:
            options |= {"top_p": draw.choice([1.0, 0.8]), "min_p": draw.choice([0.0, 0.1])}
        arrival = draw.randrange(1, 150)
        planned.append(
            dict(
                arrival=arrival,
                prompt=[draw.randrange(3, 16) for _ in range(draw.choice([1, 9, 40, 200]))],
                options=options,
                abort=arrival + draw.randrange(1, 20) if draw.random() < 0.15 else None,
            )
        )
    return planned


def serve(engine, planned):
    """Run the plan.

    Returns:
        The output tokens of each greedy request that was not aborted, by its place in the plan. Then the free
        slots before and after.
    """
    free, turn, requests = engine.free_slots(), 0, []
    running = {}

    def each_turn():
        nonlocal turn
        turn += 1
        for place, plan in enumerate(planned):
            if plan["arrival"] == turn:
                running[place] = engine.submit(plan["prompt"], **plan["options"])
                requests.append(running[place])
            if plan["abort"] == turn and place in running:
                engine.abort(running[place])
        return len(running) == len(planned)

    engine.finish(requests, each_turn)
    outputs = {
        place: list(request.output_ids_through_stop)
        for place, request in running.items()
        if planned[place]["abort"] is None and planned[place]["options"]["temperature"] == 0
    }
    return outputs, (free, engine.free_slots())


class TestLoad(CustomTestCase):
    def test_mixed_load(self):
        _, target, drafter = write_models_for(type(self))
        plain = {"model_path": target, "skip_tokenizer_init": False, "grammar_backend": "xgrammar",
                 "max_total_tokens": 2500}  # fmt: skip
        tree = plain | {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": drafter}
        planned = schedule(5)
        expected, _ = run_engine(plain, serve, planned)
        self.assertGreater(len(expected), REQUESTS // 3)
        for arguments in ({}, {"page_size": 16, "chunked_prefill_size": 32, "enable_mixed_chunk": True}):
            with self.subTest(arguments):
                outputs, (before, after) = run_engine(tree | arguments, serve, planned)
                self.assertEqual(outputs, expected)
                self.assertEqual(before, after, "KV slots leaked")


if __name__ == "__main__":
    unittest.main()
