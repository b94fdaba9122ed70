"""Record a tiny DeepSeek-V4's index keys and queries in float32, before they are rounded, for recall.py.

    PYTHONPATH=test python benchmark/dsv4/record_keys.py --output KEYS.pt

The model has random weights. One prompt of random tokens is prefilled on a GPU. The file holds, per C4 layer, all keys
of the prompt, and for each length the queries of the last tokens before it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from support.deepseek_v4 import CUDA, replace_tilelang, spread_weights, write_model
from support.engine import Engine
from support.processes import unused_port

LENGTHS = (4096, 32768, 131072)  # tokens; multiples of CHUNK, after which queries are kept
CHUNK = 2048
QUERIES = 64


def rotate(x, freqs, positions):
    """Rotate the last 64 elements in neighbouring pairs, in float32. freqs: [positions, 64], cosine and sine in turn."""
    angles = freqs[positions.long()].view(len(x), *[1] * (x.dim() - 2), -1, 2)
    tail = torch.view_as_complex(x[..., -64:].float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(tail * torch.view_as_complex(angles.contiguous())).flatten(-2)
    return torch.cat([x[..., :-64].float(), turned], -1)


class Recorder:
    """Copies what the backend is about to round."""

    def __init__(self, module):
        self.keys, self.queries = {}, {}  # by buffer address, and by layer and length
        self._store, self._compute_q = module.store_index_keys, module.Bf16Query.compute_q
        module.store_index_keys = self.store
        module.Bf16Query.compute_q = lambda query, *args: self.compute_q(query, *args)

    def store(self, kv, plan, norm_weight, norm_eps, freqs, out_loc, keys, *, decode):
        lengths = plan.view(torch.int32)[:, 0]
        valid = (lengths > 0) & (lengths % 4 == 0)
        x, lengths = kv[valid].float(), lengths[valid]
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
        parts = self.keys.setdefault(keys.data_ptr(), [])
        parts.append((lengths.cpu(), rotate(x, freqs, lengths - 4).cpu()))
        self._store(kv, plan, norm_weight, norm_eps, freqs, out_loc, keys, decode=decode)

    def compute_q(self, query, q_lora, positions, weight, q_lora_quant=None):
        indexer = query._indexer
        tokens = int(positions[-1]) + 1
        if tokens in LENGTHS:
            q, _ = indexer.wq_b(q_lora[-QUERIES:])
            freqs = torch.view_as_real(indexer.freqs_cis).flatten(-2)
            q = rotate(q.view(len(q), -1, indexer.head_dim), freqs, positions[-QUERIES:])
            scaled = weight[-QUERIES:].float() * indexer.weight_scale
            self.queries[indexer.layer_id, tokens] = (q.cpu(), scaled.cpu())
        return self._compute_q(query, q_lora, positions, weight, q_lora_quant)

    def by_layer(self, pool):
        """{layer: (keys [n, 128], {tokens: (q [rows, heads, 128], weights [rows, heads])})}."""
        found = {}
        for layer in sorted({layer for layer, _ in self.queries}):
            lengths, keys = map(
                torch.cat, zip(*self.keys[pool.get_index_k_with_scale_buffer(layer).data_ptr()])
            )
            order = lengths.argsort()
            expected = torch.arange(4, 4 * len(lengths) + 1, 4, dtype=lengths.dtype)
            if not torch.equal(lengths[order], expected):
                raise SystemExit(
                    f"layer {layer}: expected a key for every 4 tokens, got lengths {lengths[order]}"
                )
            found[layer] = (keys[order], {n: q for (of, n), q in self.queries.items() if of == layer})
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    replace_tilelang()
    from sglang.srt.layers.attention.dsv4 import bf16_index_keys

    tokens = max(LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(**CUDA | dict(
            model_path=write_model(Path(folder), tokens + 64), context_length=tokens + 64,
            max_total_tokens=tokens + 4096, chunked_prefill_size=CHUNK, disable_cuda_graph=True,
            dsv4_index_k_dtype="bf16", nccl_port=unused_port(),
        ))  # fmt: skip
        runner = engine.scheduler.tp_worker.model_runner
        spread_weights(runner.model)
        recorder = Recorder(bf16_index_keys)
        prompt = torch.randint(2, 1024, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        engine.generate([prompt], temperature=0, max_new_tokens=1, ignore_eos=True)
        torch.save(recorder.by_layer(runner.token_to_kv_pool), args.output)


if __name__ == "__main__":
    main()
