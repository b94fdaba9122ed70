"""A load of many kinds of requests that arrive over time, some of which are aborted."""

from __future__ import annotations

import random
from typing import Any

from support.engine import Engine

REQUESTS = 120
REGEX = r"\[[01](,[01])*\]"
BEGINNING = r"\[([01](,[01])*(,|\](</s>)?)?)?"  # of what REGEX matches, and the end


def schedule(seed: int, *, grammars: bool = True) -> list[dict[str, Any]]:
    """Plan requests of every kind. Arrival and abort are turns of the event loop (abort: or None).

    Args:
        seed: the seed of the plan.
        grammars: some requests have a grammar.

    Returns:
        One plan per request: arrival, prompt, sampling parameters and abort.
    """
    draw = random.Random(seed)
    planned: list[dict[str, Any]] = []
    for _ in range(REQUESTS):
        options: dict[str, Any] = {
            "max_new_tokens": draw.choice([1, 2, 7, 30, 60]),
            "temperature": draw.choice([0, 0, 1.0]),
        }
        kind = draw.random()
        if kind < 0.2 and grammars:
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


def serve(engine: Engine, planned: list[dict[str, Any]]) -> tuple[dict[int, list[int]], tuple[Any, Any]]:
    """Run the plan.

    Returns:
        The output tokens of each greedy request that was not aborted, by its place in the plan. Then the free
        slots before and after.
    """
    free, turn, requests = engine.free_slots(), 0, []
    running: dict[int, Any] = {}

    def each_turn() -> bool:
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


def retractions(engine: Engine) -> list[str]:
    """Watch an engine.

    Returns:
        The ids of the requests that its scheduler retracts. The list grows with each.
    """
    queue = engine.scheduler._add_request_to_queue
    retracted: list[str] = []

    def watched(request: Any, is_retracted: bool = False, **options: Any) -> None:
        retracted.extend([request.rid] * is_retracted)
        queue(request, is_retracted=is_retracted, **options)

    engine.scheduler._add_request_to_queue = watched
    return retracted
