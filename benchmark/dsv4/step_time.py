"""Time a decode step of a tiny DeepSeek-V4 with index keys in fp8 and in bfloat16, side by side on one GPU.

    PYTHONPATH=test python benchmark/dsv4/step_time.py --commit COMMIT --output FILE.json

The time is that of the step's CUDA graph. Both engines hold the same prompts. One replays its graph while the other is
idle, in turn. The bytes of the keys say how much longer a step with bfloat16 should take:

    expected ratio = 1 + (256 - 132 bytes) * keys of the batch * C4 layers / copy rate / time with fp8
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from pathlib import Path

import torch
from support.deepseek_v4 import CUDA, VOCABULARY, Job, write_model
from support.model_configs import MODELS
from support.processes import EngineProcess

ROUNDS, REPLAYS = 9, 40
STEPS = 8  # of the whole batch before the measurement
MORE_BYTES = 2 * MODELS["deepseek_v4"]["index_head_dim"] - 132  # of a bfloat16 key than of an fp8 key
C4_LAYERS = MODELS["deepseek_v4"]["compress_ratios"][:-1].count(4)


def milliseconds(run, times):
    """Device time of one run(), as the mean of many in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def copy_rate():
    """Bytes per second that a copy of 4 GB reads and writes."""
    source = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    milliseconds(lambda: copy.copy_(source), 3)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: copy.copy_(source), 10))


class Steps(Job):
    """Prefills prompts of equal length, then times the graph of a decode step, once per batch size.

    It is called with a barrier for both engines, by which they take turns, and with whether this engine is the first.

    Args:
        tokens: the number of tokens of each prompt.
        batches: the batch sizes, in rising order.
    """

    def __init__(self, tokens, batches):
        super().__init__()
        self.tokens, self.batches = tokens, batches

    def __call__(self, engine, barrier, first):
        self.barrier, self.first = barrier, first
        return super().__call__(engine)

    def answer(self, engine):
        """Return the times of all rounds by batch size, and on the first engine the copy rate."""
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(2, VOCABULARY, (max(self.batches), self.tokens), generator=generator).tolist()
        times, steps = {}, 0
        replay = FullCudaGraphBackend.replay

        def timed(backend, shape_key, *args, **options):
            nonlocal steps
            result = replay(backend, shape_key, *args, **options)
            steps += shape_key.size == batch
            if steps == STEPS and batch not in times:
                times[batch] = self.take_turns(lambda: replay(backend, shape_key, *args, **options))
                print(f"batch {batch}, first engine {self.first}: {times[batch]}", flush=True)
            return result

        for batch in self.batches:
            FullCudaGraphBackend.replay = replay
            engine.generate(prompts[:batch], temperature=0, max_new_tokens=1, ignore_eos=True)
            FullCudaGraphBackend.replay, steps = timed, 0
            engine.generate(prompts[:batch], temperature=0, max_new_tokens=4 * STEPS, ignore_eos=True)
        self.barrier.wait()
        return times, copy_rate() if self.first else None

    def take_turns(self, run):
        torch.cuda.synchronize()
        rounds = []
        for _ in range(ROUNDS):
            for mine in (self.first, not self.first):
                self.barrier.wait()
                if mine:
                    run()
                    rounds.append(milliseconds(run, REPLAYS))
        self.barrier.wait()
        return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of each prompt, default %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="in rising order")
    parser.add_argument("--commit", required=True, help="for the results file")
    parser.add_argument("--seconds", type=float, default=240, help="time for everything, default %(default)s")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    barrier = multiprocessing.get_context("spawn").Barrier(2, timeout=args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        arguments = CUDA | dict(
            model_path=write_model(Path(folder), args.tokens + 1024), context_length=args.tokens + 1024,
            max_total_tokens=max(args.batches) * (args.tokens + 512) + 16384, chunked_prefill_size=8192,
            max_running_requests=max(args.batches), cuda_graph_bs_decode=args.batches,
            cuda_graph_max_bs_decode=max(args.batches),
        )  # fmt: skip
        processes = {
            keys: EngineProcess(
                arguments | {"dsv4_index_k_dtype": keys},
                Steps(args.tokens, args.batches),
                barrier,
                keys == "auto",
            )
            for keys in ("auto", "bf16")
        }
        (fp8, rate), (bf16, _) = (process.result(args.seconds) for process in processes.values())
    rows = []
    print(f"copy rate {rate / 1e12:.2f} TB/s")
    print("| batch | fp8 us | bf16 us | ratio | expected |\n|-|-|-|-|-|")
    for batch in args.batches:
        fp8_us, bf16_us = (1e3 * statistics.median(times[batch]) for times in (fp8, bf16))
        more = MORE_BYTES * batch * (args.tokens // 4) * C4_LAYERS
        row = dict(
            batch=batch,
            fp8_us=fp8_us,
            bf16_us=bf16_us,
            ratio=bf16_us / fp8_us,
            expected=1 + 1e6 * more / rate / fp8_us,
        )
        rows.append(row | dict(fp8_rounds_ms=fp8[batch], bf16_rounds_ms=bf16[batch]))
        print(f"| {batch} | {fp8_us:.1f} | {bf16_us:.1f} | {row['ratio']:.3f} | {row['expected']:.3f} |")
    args.output.write_text(
        json.dumps(
            dict(commit=args.commit, gpu=torch.cuda.get_device_name(), torch=torch.__version__,
                 tokens=args.tokens, copy_bytes_per_second=rate, rows=rows), indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
