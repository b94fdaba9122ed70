"""Capture time and graph pool memory of a real model class with and without the guard, in pairs.

    python benchmark/graph_guard/bench_capture.py --output benchmark/graph_guard/results/h200-2026-11-29-capture.json

Loads a Qwen3 of 28 layers with random weights (q and k normalized on two streams) through upstream's one_batch and
captures its decode graphs again and again, each time into a new pool.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "test/gpu"), str(Path(__file__).parent)]
from bench_graph_guard import command_line, interval  # noqa: E402
from graph_guard_harness import pool_bytes  # noqa: E402
from test_graph_guard_models import MODELS  # noqa: E402

FLAGS = (
    "--load-format dummy --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.2 "
    "--max-total-tokens 4096 --max-running-requests 16 --cuda-graph-backend-prefill disabled --batch-size 8"
).split()


def load(folder):
    """The ModelRunner of one process, its graphs captured once."""
    from sglang.benchmark import one_batch

    class Loaded(Exception):
        pass

    load_model = one_batch.load_model

    def load_and_stop(*args):
        raise Loaded(load_model(*args)[0].torch_runner)

    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch.load_model = load_and_stop
    config = {**MODELS["qwen3"], "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}
    Path(folder, "config.json").write_text(json.dumps(config))
    sys.argv[1:] = ["--model-path", folder, *FLAGS]
    try:
        one_batch.cli_main()
    except Loaded as loaded:
        return loaded.args[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    command = command_line(sys.argv[1:])
    from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool

    with tempfile.TemporaryDirectory() as folder:
        model_runner = load(folder)
    runner = model_runner.decode_cuda_graph_runner
    seconds, memory = {False: [], True: []}, {}
    for pair in range(args.pairs + 1):
        for guard in (pair % 2 == 0, pair % 2 == 1):
            runner.backend.cleanup()
            set_global_graph_memory_pool(None)
            gc.collect()
            torch.cuda.empty_cache()
            os.environ["SGLANG_GRAPH_GUARD"] = str(int(guard))
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                runner.capture()
            torch.cuda.synchronize()
            if pair:  # the first pair warms up
                seconds[guard].append(time.perf_counter() - start)
            memory[guard] = pool_bytes(runner.backend)
    mean, half = interval([on / off for on, off in zip(seconds[True], seconds[False], strict=True)])
    commit = os.environ.get("GRAPH_GUARD_COMMIT")
    if not commit:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = head.stdout.strip()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit,
        "command": command,
        "model": "Qwen3, 28 layers, hidden 1024, 8 heads of 96, random weights",
        "sizes": runner.capture_bs,
        "capture": {
            "off_s": statistics.median(seconds[False]),
            "on_s": statistics.median(seconds[True]),
            "ratio": mean,
            "ratio_95": [mean - half, mean + half],
            "pairs": args.pairs,
        },
        "pool_bytes": {"off": memory[False], "on": memory[True], "ratio": memory[True] / memory[False]},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    c = result["capture"]
    print(f"capture: {c['off_s']:.3f} -> {c['on_s']:.3f} s, ratio {c['ratio']:.3f} {c['ratio_95']}")
    print(f"pool: {memory[False]} -> {memory[True]} bytes, ratio {result['pool_bytes']['ratio']:.3f}")


if __name__ == "__main__":
    main()
