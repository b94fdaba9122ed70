"""The cost of stream-safe capture in plain torch layers: replay time, graph pool memory and capture time.

    PYTHONPATH=test python benchmark/graph_guard/bench_graph_guard.py --output RESULT.json

Every measurement is a pair, with and without the guard, and the order alternates from pair to pair. Both members of a
pair capture the same code through FullCudaGraphBackend. The code is safe without the guard: it keeps every reference
until the join. The result is the mean ratio on/off with its 95% t-interval. The control is the same ratio for a second
capture without the guard. It shows how much two captures of one program differ.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from support.graph_guard import backend, pool_bytes

ROOT = Path(__file__).parents[2]
SIZES = (64, 32, 16, 8, 4, 2, 1)  # runners capture in this order too
LAYERS, HIDDEN, FFN = 32, 2048, 4096
REPLAYS = 20  # of a graph, timed together


class Model(torch.nn.Module):
    """Decoder-like layers with the two overlaps of upstream's models: a norm and a shared expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)

        def weight(n_in, n_out):
            return (torch.randn(n_in, n_out, device="cuda") / n_in**0.5).to(torch.bfloat16)

        self.layers = [
            {
                "qkv": weight(HIDDEN, 3 * HIDDEN),
                "o": weight(HIDDEN, HIDDEN),
                "up": weight(HIDDEN, FFN),
                "down": weight(FFN, HIDDEN),
                "shared_up": weight(HIDDEN, FFN),
                "shared_down": weight(FFN, HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        self.alt = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        norm = torch.nn.functional.rms_norm
        for w in self.layers:
            q, k, v = (norm(x, (HIDDEN,)) @ w["qkv"]).split(HIDDEN, dim=1)
            self.alt.wait_stream(main)
            q2 = norm(q, (HIDDEN,))
            with torch.cuda.stream(self.alt):
                k2 = norm(k, (HIDDEN,))
            main.wait_stream(self.alt)
            x = x + (torch.sigmoid(q2 * k2) * v) @ w["o"]
            h = norm(x, (HIDDEN,))
            self.alt.wait_stream(main)
            with torch.cuda.stream(self.alt):
                shared = torch.relu(h @ w["shared_up"]) @ w["shared_down"]
            routed = torch.relu(h @ w["up"]) @ w["down"]
            main.wait_stream(self.alt)
            x = x + routed + shared
            self.alt.wait_stream(main)  # main reads what alt allocated
        main.wait_stream(self.alt)
        return x


def interval(ratios):
    """(mean, half width of the 95% t-interval)."""
    n, z = len(ratios), 1.959964
    df = n - 1
    # Student's t quantile from the normal one (Cornish-Fisher). The error is below 1% from 5 degrees of freedom on.
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return statistics.fmean(ratios), t * statistics.stdev(ratios) / math.sqrt(n)


def origin(arguments):
    """The fields of a result that say where it comes from: GPU, torch, commit and command."""
    commit = os.environ.get("GRAPH_GUARD_COMMIT")  # for machines that have no git checkout
    if not commit:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = head.stdout.strip()
    shown = [
        Path(a).name if os.sep in a else a for a in arguments
    ]  # the folder of the output does not matter
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(["python", f"benchmark/graph_guard/{Path(sys.argv[0]).name}", *shown]),
    }


def save(result, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def capture_all(capture, model, x):
    torch.cuda.synchronize()
    start = time.perf_counter()
    replays = {n: capture(n, lambda n=n: model(x[:n])) for n in SIZES}
    torch.cuda.synchronize()
    return time.perf_counter() - start, replays


def replay_ms(replay, times):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def capture_cost(seconds, memory):
    """What the guard costs at capture.

    Args:
        seconds: the time of each capture, by whether the guard was on. Captures of one index are a pair.
        memory: bytes of the graph pool, by whether the guard was on.

    Returns:
        The fields `capture` and `pool_bytes` of a results file.
    """
    mean, half = interval([on / off for on, off in zip(seconds[True], seconds[False], strict=True)])
    return {
        "capture": {
            "off_s": statistics.median(seconds[False]),
            "on_s": statistics.median(seconds[True]),
            "ratio": mean,
            "ratio_95": [mean - half, mean + half],
            "pairs": len(seconds[True]),
        },
        "pool_bytes": {"off": memory[False], "on": memory[True], "ratio": memory[True] / memory[False]},
    }


def show_capture_cost(result):
    """Print the fields of capture_cost()."""
    capture, pool = result["capture"], result["pool_bytes"]
    print(
        f"capture: {capture['off_s']:.3f} -> {capture['on_s']:.3f} s, ratio {capture['ratio']:.3f} {capture['ratio_95']}"
    )
    print(f"pool: {pool['off'] / 2**20:.1f} -> {pool['on'] / 2**20:.1f} MiB, ratio {pool['ratio']:.3f}")


def time_captures(model, x, stream, pairs):
    """Capture in pairs with and without the guard; return the seconds and the pool's bytes by guard."""
    seconds, memory = {False: [], True: []}, {}
    for pair in range(pairs):
        for guard in (pair % 2 == 0, pair % 2 == 1):
            with backend("full", guard=guard, stream=stream) as capture:
                took, _ = capture_all(capture, model, x)
                seconds[guard].append(took)
                memory[guard] = pool_bytes(capture.backend)
    return seconds, memory


def time_replays(graphs, pairs):
    """Replay each graph in turn.

    Args:
        graphs: replay functions, by whether the guard was "on", "off", or "off again" (the control).
        pairs: rounds that count. Three more before them warm up.

    Returns:
        For each, the milliseconds per replay of each round.
    """
    times = {name: [] for name in graphs}
    for pair in range(-3, pairs):
        order = list(graphs)
        for name in order if pair % 2 == 0 else reversed(order):
            ms = replay_ms(graphs[name], REPLAYS)
            if pair >= 0:
                times[name].append(ms)
    return times


def replay_cost(times):
    """What the guard costs per replay: the fields of a size in a results file, from time_replays()."""
    (mean, half), (control, control_half) = (
        interval([a / b for a, b in zip(times[name], times["off"], strict=True)])
        for name in ("on", "off again")
    )
    return {
        "off_ms": statistics.median(times["off"]),
        "on_ms": statistics.median(times["on"]),
        "ratio": mean,
        "ratio_95": [mean - half, mean + half],
        "control": control,
        "control_95": [control - control_half, control + control_half],
        "pairs": len(times["off"]),
        "replays_each": REPLAYS,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replay-pairs", type=int, default=60)
    parser.add_argument("--capture-pairs", type=int, default=12)
    args = parser.parse_args()

    model, x = Model(), torch.randn(SIZES[0], HIDDEN, device="cuda").to(torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), ExitStack() as stack:
        with backend("full", stream=stream) as capture:  # loads all kernels before anything is timed
            capture_all(capture, model, x)
        seconds, memory = time_captures(model, x, stream, args.capture_pairs)
        graphs = {}
        for name, guard in (("off", False), ("on", True), ("off again", False)):
            capture = stack.enter_context(backend("full", guard=guard, stream=stream))
            graphs[name] = capture_all(capture, model, x)[1]
        replays = {
            n: replay_cost(
                time_replays({name: graph[n] for name, graph in graphs.items()}, args.replay_pairs)
            )
            for n in (SIZES[0], SIZES[-1])
        }
    result = {
        **origin(sys.argv[1:]),
        "model": {"layers": LAYERS, "hidden": HIDDEN, "ffn": FFN, "sizes": SIZES},
        "replay": replays,
        **capture_cost(seconds, memory),
    }
    save(result, args.output)
    for n, r in replays.items():
        print(
            f"replay size {n}: {r['off_ms']:.4f} -> {r['on_ms']:.4f} ms, ratio {r['ratio']:.4f} {r['ratio_95']}, "
            f"control {r['control']:.4f} {r['control_95']}"
        )
    show_capture_cost(result)


if __name__ == "__main__":
    main()
