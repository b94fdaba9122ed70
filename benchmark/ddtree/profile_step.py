"""Shows where the time of a decode step goes, for DFLASH and DDTREE: kernels and host operators.

It profiles an engine (support.engine) with one request, graphs and overlap scheduling. A profiler slows the
host down, so read shares, not speeds.

    PYTHONPATH=test python -m benchmark.ddtree.profile_step --model DIR --drafter DIR --prompts prompts.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from support.engine import Engine
from support.processes import EngineProcess

TOKENS = 120


def profile(engine: Engine, prompt: list[int], rows: int) -> str:
    """Profile one answer; return a table with `rows` kernels and `rows` operators."""
    import torch
    from torch.profiler import ProfilerActivity

    options = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    engine.generate([prompt], **options)
    began = time.perf_counter()
    (request,) = engine.generate([prompt], **options)
    seconds = time.perf_counter() - began
    steps = request.spec_verify_ct or TOKENS
    activities = [ProfilerActivity.CPU]
    if engine.args.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        engine.generate([prompt], **options)
        if engine.args.device == "cuda":
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    lines = [f"{steps} steps, {1000 * seconds / steps:.3f} ms per step without the profiler"]
    for title, field in (("device", "self_device_time_total"), ("host", "self_cpu_time_total")):
        total = sum(getattr(event, field) for event in averages)
        lines.append(f"{title}: {total / steps:.0f} us per step")
        for event in sorted(averages, key=lambda e: getattr(e, field), reverse=True)[:rows]:
            each = getattr(event, field) / steps
            lines.append(f"  {each:8.1f} us  {event.count / steps:6.1f} x  {event.key[:110]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=25, help="rows of each table")
    args = parser.parse_args()
    prompt = json.loads(args.prompts.read_text())[0]
    plain = dict(model_path=args.model, device=args.device, max_total_tokens=16384, context_length=2048)
    if args.device == "cuda":
        plain |= dict(dtype="bfloat16", attention_backend="triton", mem_fraction_static=0.8, max_running_requests=4,
                      cuda_graph_max_bs_decode=4, cuda_graph_backend_prefill="disabled")  # fmt: skip
    spec = plain | dict(speculative_draft_model_path=args.drafter)
    cases = {"DDTREE": spec | dict(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32)}
    if args.device == "cuda":
        cases["DFLASH"] = spec | dict(speculative_algorithm="DFLASH")
    children = {
        case: EngineProcess(arguments, profile, prompt, args.rows) for case, arguments in cases.items()
    }
    for case, child in children.items():
        try:
            print(f"== {case}: {child.result(180)}", flush=True)
        except RuntimeError as error:
            print(f"== {case}: {error}", flush=True)


if __name__ == "__main__":
    main()
