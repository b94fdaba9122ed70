"""Measures the time of a decode step of a target of realistic size, with random weights.

A step of the demo model consists of kernel launches and host time. A large target is bound by the bandwidth
of its weights. A verify of N nodes reads them once, as plain decoding does for one token. With random weights
the drafter knows nothing of the target, so every algorithm emits about one token per step. Only the time of a
step means something here.

It runs engines (support.engine) with graphs and overlap scheduling, without HTTP and tokenizer. A few engines
start at a time and are measured one after another while the others are idle. The time of a step is the
difference between a long and a short answer divided by the difference in steps, so prefill is not in it.

    PYTHONPATH=test python -m benchmark.ddtree.bench_shape --output RESULTS.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from support.engine import Engine
from support.processes import EngineProcess

from benchmark.ddtree.record import origin, save

SHAPES = {
    # Llama-3.1-8B, and a drafter with five layers of the same width.
    "8b": dict(
        hidden=4096, inner=14336, heads=32, kv_heads=8, layers=32, vocabulary=128256, drafter_layers=5
    ),
    "tiny": dict(hidden=128, inner=256, heads=2, kv_heads=1, layers=3, vocabulary=512, drafter_layers=2),
}
BLOCK_SIZE = 16
START_SECONDS = 240


def write_configs(
    folder: Path,
    *,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    layers: int,
    vocabulary: int,
    drafter_layers: int,
) -> dict[str, str]:
    """Write the configs of a target and a drafter; return the engine arguments that name them."""
    common = dict(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, vocab_size=vocabulary, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, dtype="bfloat16",
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    target = dict(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers)
    read = [int((i + 0.5) * (layers - 1) / drafter_layers) for i in range(drafter_layers)]  # evenly spread
    drafter = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=drafter_layers, block_size=BLOCK_SIZE,
        num_target_layers=layers, dflash_config=dict(target_layer_ids=read, mask_token_id=2, block_size=BLOCK_SIZE),
    )  # fmt: skip
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(common | config))
    return dict(model_path=str(folder / "target"), speculative_draft_model_path=str(folder / "drafter"))


def randomize(engine: Engine) -> None:
    """Draw weights of a usual size. Upstream's dummy weights are so small that all logits tie."""
    import torch

    runners = [engine.scheduler.tp_worker.model_runner]
    if engine.scheduler.draft_worker is not None:
        runners.append(engine.scheduler.draft_worker.draft_model_runner)
    generator = torch.Generator(device=runners[0].device).manual_seed(1)
    with torch.no_grad():
        for runner in runners:
            for weight in runner.model.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=0.02, generator=generator)
                else:
                    weight.fill_(1.0)


def measure(
    engine: Engine, ready: Any, turn: Any, batches: list[int], context: int, tokens: int, repeats: int
) -> list[dict]:
    """Measure an engine at each batch size.

    Args:
        engine: engine with dummy weights.
        ready: barrier. Measuring begins when all engines have started.
        turn: lock. One engine is measured at a time.
        batches: batch sizes.
        context: tokens per prompt.
        tokens: tokens of the long answer. The short one has a quarter of them.
        repeats: measurements per batch size.

    Returns:
        A row per batch size.
    """
    randomize(engine)
    try:
        ready.wait(START_SECONDS)
    except threading.BrokenBarrierError:
        pass  # another engine did not start
    vocabulary = engine.scheduler.model_config.vocab_size

    def answer(batch: int, count: int) -> tuple[float, float, float]:
        """Seconds for `batch` answers, and steps and tokens per request."""
        prompts = [[3 + (17 * i + 31 * j) % (vocabulary - 3) for j in range(context)] for i in range(batch)]
        began = time.perf_counter()
        requests = engine.generate(prompts, temperature=0, max_new_tokens=count, ignore_eos=True)
        seconds = time.perf_counter() - began
        steps = sum(request.spec_verify_ct for request in requests) / batch or count - 1
        return seconds, steps, sum(len(request.output_ids) for request in requests) / batch

    rows = []
    with turn:
        for batch in batches:
            answer(batch, 16)  # fills the radix cache with the prompts
            times, steps = [], 0.0
            for _ in range(repeats):
                short, long = answer(batch, tokens // 4), answer(batch, tokens)
                steps += long[1] - short[1]
                times.append(1000 * (long[0] - short[0]) / (long[1] - short[1]))
            rows.append(
                dict(
                    batch=batch,
                    step_ms=statistics.median(times),
                    step_ms_of_each_repeat=times,
                    tokens_per_step_by_chance=(long[2] - 1) / long[1],
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--cases", nargs="+", help="cases: none, DFLASH or DDTREE:N; default: %(default)s",
        default=["none", "DFLASH", "DDTREE:32", "none", "DDTREE:16", "DDTREE:64"],
    )  # fmt: skip
    parser.add_argument("--at-once", type=int, default=3, help="engines that start at a time")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=4096, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of the long answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of this repository; default: ask git")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    cuda = args.device == "cuda"
    result = origin(args) | dict(
        weights="random", shape=SHAPES[args.shape], block_size=BLOCK_SIZE, context=args.context, results=[]
    )
    folder = tempfile.TemporaryDirectory()
    drafted = write_configs(Path(folder.name), **SHAPES[args.shape])
    most = max(args.batches)
    plain = dict(
        model_path=drafted["model_path"], device=args.device, load_format="dummy", max_running_requests=most,
        max_total_tokens=most * (args.context + args.tokens + 256), context_length=args.context + args.tokens + 512,
    ) | (
        dict(dtype="bfloat16", attention_backend="triton", cuda_graph_bs_decode=args.batches, mem_fraction_static=0.8,
             cuda_graph_backend_prefill="disabled") if cuda else {}
    )  # fmt: skip

    def arguments(case: str) -> dict:
        algorithm, _, num_nodes = case.partition(":")
        if algorithm == "none":
            return plain
        spec = drafted | dict(speculative_algorithm=algorithm, speculative_draft_load_format="dummy")
        if algorithm == "DFLASH":
            spec["speculative_draft_attention_backend"] = "triton"
        return plain | spec | (dict(speculative_num_draft_tokens=int(num_nodes)) if num_nodes else {})

    context = multiprocessing.get_context("spawn" if cuda else "fork")
    for i in range(0, len(args.cases), args.at_once):
        cases = args.cases[i : i + args.at_once]
        shared = (
            context.Barrier(len(cases)),
            context.Lock(),
            args.batches,
            args.context,
            args.tokens,
            args.repeats,
        )
        children = [EngineProcess(arguments(case), measure, *shared) for case in cases]
        for case, child in zip(cases, children):
            try:
                rows = child.result(START_SECONDS + 120)
            except RuntimeError as error:
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                continue
            for row in rows:
                result["results"].append(dict(case=case) | row)
                print(
                    f"{case:10} batch {row['batch']:2}  {row['step_ms']:7.3f} ms/step  "
                    f"{[round(t, 3) for t in row['step_ms_of_each_repeat']]}  by chance {row['tokens_per_step_by_chance']:.2f}",
                    flush=True,
                )
            save(result, args.output)


if __name__ == "__main__":
    main()
