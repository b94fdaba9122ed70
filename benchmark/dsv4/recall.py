"""How many of the best keys an indexer selects when its keys and queries are in fp8 or bfloat16 instead of float32.

    python benchmark/dsv4/recall.py --recorded KEYS.pt --output RESULT.json

The float32 scores of all keys say which TOPK keys are the best. Recall is the part of them that the scores of the other
format also select. The formats:

- bf16: --dsv4-index-k-dtype bf16. Scores come from the native op.
- fp8: upstream's. Keys and queries are rotated by a Hadamard transform and rounded to e4m3 with one scale per key and
  one per query head. Scores are computed in float32 from the rounded values.

record_keys.py writes KEYS.pt. The keys with outlier channels are random.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from sgl_kernel.ddtree import index_logits

TOPK = 512
HEADS, HEAD_DIM, PAGE = 64, 128, 64
RATIO = 4  # tokens per key
LENGTHS = (4096, 32768, 131072)  # tokens
OUTLIERS = {
    3: 24.0,
    17: -16.0,
    64: 12.0,
    101: 8.0,
}  # channel: offset, in units of the other channels' deviation


def hadamard(x):
    """Multiply the last dimension by the normalized Hadamard matrix, in float32."""
    h = torch.ones(1, 1)
    while len(h) < x.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x.float() @ h.to(x.device) * len(h) ** -0.5


def through_fp8(x):
    """Round as upstream stores keys and queries: rotated, e4m3, one scale for each row of 128."""
    x = hadamard(x)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def scores(q, keys, weights):
    """The indexer's scores in float32.

    Args:
        q: [rows, HEADS, HEAD_DIM]. keys: [n, HEAD_DIM]. weights: [rows, HEADS].

    Returns:
        [rows, n] float32.
    """
    return torch.stack(
        [(w[:, None] * (one.float() @ keys.float().T).relu()).sum(0) for one, w in zip(q, weights)]
    )


def scores_of_op(q, keys, weights):
    """The scores of the native op over one request's pages of bfloat16 keys."""
    n = len(keys)
    pages = torch.zeros(-(-n // PAGE) * PAGE, HEAD_DIM, dtype=torch.bfloat16, device=keys.device)
    pages[:n] = keys
    rows = len(q)
    table = (
        torch.arange(len(pages) // PAGE, dtype=torch.int32, device=keys.device).expand(rows, -1).contiguous()
    )
    lengths = torch.full((rows,), n, dtype=torch.int32, device=keys.device)
    out = torch.empty(rows, n, device=keys.device)
    return index_logits(
        q.to(torch.bfloat16), pages.view(-1, PAGE, HEAD_DIM), weights.float(), lengths, table, out
    )


def recall(found, best):
    """The part of each row's TOPK best keys that the other scores select, as [rows]."""
    k = min(TOPK, best.shape[1])
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, found.topk(k).indices, True)
    return chosen.gather(1, best.topk(k).indices).float().mean(1)


def with_outliers(n, rows, device, seed=0):
    """Random keys and queries of which a few channels have large offsets, as the keys of real models have."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, HEAD_DIM, generator=generator)
    q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator)
    for channel, offset in OUTLIERS.items():
        keys[:, channel] += offset
        q[..., channel] *= 2
    keys /= keys.square().mean(1, keepdim=True).sqrt()
    weights = torch.randn(rows, HEADS, generator=generator) * (HEADS * HEAD_DIM) ** -0.5
    return keys.to(device), q.to(device), weights.to(device)


def measure(name, keys, q, weights, tokens):
    """One row of the table."""
    keys = keys[: tokens // RATIO]
    best = scores(q, keys, weights)
    found = {
        "fp8": recall(scores(through_fp8(q), through_fp8(keys), weights), best),
        "bf16": recall(scores_of_op(q, keys, weights), best),
    }
    row = {"keys": name, "tokens": tokens, "index_keys": len(keys), "queries": len(q)}
    for dtype, values in found.items():
        row[dtype] = {"mean": values.mean().item(), "worst": values.min().item()}
    print(
        f"|{name}|{tokens}|"
        + "|".join(f"{row[d]['mean']:.4f}|{row[d]['worst']:.4f}" for d in ("fp8", "bf16"))
        + "|",
        flush=True,
    )
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recorded", type=Path, help="file of record_keys.py")
    parser.add_argument("--queries", type=int, default=64, help="random queries")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32

    print(f"|keys|tokens|fp8 recall@{TOPK}|worst query|bf16 recall@{TOPK}|worst query|\n|-|-|-|-|-|-|")
    keys, *queries = with_outliers(max(args.lengths) // RATIO, args.queries, args.device)
    sources = {"outlier channels": (keys, dict.fromkeys(args.lengths, queries))}
    if args.recorded:
        recorded = torch.load(args.recorded, map_location=args.device)
        sources |= {f"recorded, layer {layer}": source for layer, source in recorded.items()}
    rows = [
        measure(name, keys, *queries[tokens], tokens)
        for name, (keys, queries) in sources.items()
        for tokens in args.lengths
        if tokens in queries
    ]
    if args.output:
        record = {
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "commit": args.commit,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "topk": TOPK,
            "outliers": OUTLIERS,
            "rows": rows,
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
