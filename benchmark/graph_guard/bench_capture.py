"""The capture time and graph pool memory of a real model class, in pairs with and without the guard.

    PYTHONPATH=test python benchmark/graph_guard/bench_capture.py --output RESULT.json

Loads a 28-layer Qwen3 with random weights, which normalizes q and k on two streams. Then it captures the decode graphs
repeatedly, each time into a new memory pool.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_graph_guard import capture_cost, origin, save, show_capture_cost
from support.graph_guard import pool_bytes
from support.model_configs import run_one_batch, write_config

FLAGS = (
    "--load-format dummy --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.2 "
    "--max-total-tokens 4096 --max-running-requests 16 --cuda-graph-backend-prefill disabled --batch-size 8"
).split()


def load(folder):
    """The ModelRunner of this process. Its graphs have been captured once."""
    from sglang.benchmark import one_batch

    class Loaded(Exception):
        pass

    load_model = one_batch.load_model

    def load_and_stop(*args):
        raise Loaded(load_model(*args)[0].torch_runner)

    one_batch.load_model = load_and_stop
    write_config("qwen3", Path(folder), num_hidden_layers=28, hidden_size=1024, intermediate_size=3072)
    sys.argv[1:] = ["--model-path", folder, *FLAGS]
    try:
        run_one_batch()
    except Loaded as loaded:
        return loaded.args[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    arguments = sys.argv[1:]  # load() replaces them
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
    result = {
        **origin(arguments),
        "model": "Qwen3, 28 layers, hidden 1024, 8 heads of 96, random weights",
        "sizes": runner.capture_bs,
        **capture_cost(seconds, memory),
    }
    save(result, args.output)
    show_capture_cost(result)


if __name__ == "__main__":
    main()
