"""What the tests of DDTREE on a CUDA device share."""

from __future__ import annotations

from support.engine import Engine, Greedy
from support.prompts import patterned_prompts

PROMPTS = patterned_prompts((1, 5, 35, 65, 95, 17, 300))
TOKENS = 64
# Arguments of every engine.
CUDA = dict(
    device="cuda", dtype="bfloat16", attention_backend="triton", mem_fraction_static=0.8, max_total_tokens=16384,
    cuda_graph_max_bs_decode=8, cuda_graph_backend_prefill="disabled",
)  # fmt: skip


def greedy(engine: Engine) -> tuple[Greedy, tuple[float, int, str] | None]:
    """Answer PROMPTS greedily and sample a few tokens afterwards. The free slots are counted after both.

    Returns:
        The greedy answers, and the largest difference that verify mode `validate` found, with its layer and
        request. None in other modes.
    """
    found = engine.greedy(PROMPTS, TOKENS)
    engine.generate(PROMPTS[:3], temperature=1.0, top_p=0.9, min_p=0.05, max_new_tokens=16, ignore_eos=True)
    found = found._replace(free_slots=(found.free_slots[0], engine.free_slots()))
    worker = engine.scheduler.draft_worker
    if worker is None or getattr(worker, "difference", None) is None:
        return found, None
    worst = worker.difference.read()
    return found, (worst.value, worst.layer, worst.request)


def gaps_by_name(engine: Engine, answers: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
    """Engine.gaps() of each engine's answers to PROMPTS, by name."""
    return {name: engine.gaps(PROMPTS, outputs) for name, outputs in answers.items()}
