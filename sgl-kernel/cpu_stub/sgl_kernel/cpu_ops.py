"""The `sgl_kernel` ops that SGLang 0.5.23 calls on a CPU without AMX, implemented in torch.

`register` also sets the names that model modules look up at import, so that those modules load. Calling one of these
raises.
"""

import ctypes
from collections.abc import Callable

import torch

from sgl_kernel import mamba

_MASK32 = 0xFFFFFFFF

# AMX kernels that models/{muse_glimmer,grok}.py look up at import.
_LOOKED_UP_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
)
# Kernels of hybrid models, which models/{qwen3_next,qwen3_5}.py and layers/attention/linear look up or call.
_RECURRENT = (
    mamba.fused_gdn_gating_cpu,
    mamba.fused_qk_gemma_rmsnorm_cpu,
    mamba.fused_qk_gemma_rmsnorm_with_gate_cpu,
    mamba.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    mamba.fused_rmsnorm_gated_cpu,
    mamba.fused_sigmoid_gating_delta_rule_update_cpu,
)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows within each layer's buffer, for all layers of a pool.

    All source rows of a layer are read before the first row is written, so the two lists may overlap.

    Args:
        data_ptrs: [layers] uint64 or int64, address of each layer's first row.
        strides: [layers] int64, bytes of a row, which are also the bytes from one row to the next.
        tgt_loc: [n] integer, rows to write; no row occurs twice.
        src_loc: [n] integer, rows to read.

    Raises:
        ValueError: tgt_loc and src_loc differ in length.

    Source: same behavior as the CUDA kernel copy_all_layer_kv_cache_tiled of SGLang 0.5.23.
    """
    if tgt_loc.numel() != src_loc.numel():
        raise ValueError(
            f"tgt_loc: expected as many rows as src_loc ({src_loc.numel()}), got {tgt_loc.numel()}"
        )
    if tgt_loc.numel() == 0:
        return
    targets, sources = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(targets.max(), sources.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist()):
        layer = torch.frombuffer(
            (ctypes.c_uint8 * (rows * row_bytes)).from_address(address), dtype=torch.uint8
        )
        layer = layer.view(rows, row_bytes)
        layer[targets] = layer[sources]


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write newly allocated slots into the request-to-token table. SGLang passes all arguments by position.

    Args:
        rows: [n] integer tensor, the table's row of each request.
        table: [rows, width] int32 tensor, written in place.
        starts, ends: [n] integer tensors; request i fills positions starts[i] to ends[i] - 1.
        slots: [sum of (ends - starts)] integer tensor, one request after the other.
        width: width of the table; unused here.

    Source: same behavior as the Triton kernel assign_req_to_token_pool of SGLang 0.5.23.
    """
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _murmur3_mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = (k * 0xCC9E2D51) & _MASK32
    k = ((k << 15) | (k >> 17)) & _MASK32
    h = h ^ ((k * 0x1B873593) & _MASK32)
    h = ((h << 13) | (h >> 19)) & _MASK32
    return (h * 5 + 0xE6546B64) & _MASK32


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Compute MurmurHash3 (x86, 32 bit) of the 16 bytes seed | position | column.

    Args:
        seed: [n] int64 or uint64.
        positions: [n] integer; only the low 32 bits are used.
        col_indices: [m] integer; only the low 32 bits are used.

    Returns:
        [n, m] uint32.

    Source: Appleby's MurmurHash3 with seed 0, which SGLang's seeded sampling uses on every device.
    """
    # An int64 product of two 32-bit words is exact modulo 2^64, so masking gives it modulo 2^32.
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    h = _murmur3_mix(torch.zeros_like(seed), low)
    h = _murmur3_mix(h, high)
    h = _murmur3_mix(h, positions.long() & _MASK32)
    h = _murmur3_mix(h[:, None], (col_indices.long() & _MASK32)[None, :])
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK32
    return (h ^ (h >> 16)).to(torch.uint32)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Compute x *= sigmoid(gate) in place.

    Args:
        x: [..., d] floating point, written.
        gate: as many elements as x; viewed in x's shape (for example [t, h, d] for x [t, h * d]).
    """
    x.mul_(torch.sigmoid(gate.float()).to(x.dtype).reshape(x.shape))


def register(device_only: Callable[[str], Callable]) -> None:
    """Register the ops above in torch's `sgl_kernel` library.

    Args:
        device_only: turns a name into a function that raises, for the ops that are only looked up.
    """
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    schemas = {
        "copy_all_layer_kv_cache_cpu(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()": (
            copy_all_layer_kv_cache_cpu
        ),
        "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor": murmur_hash32_cpu,
        "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": fused_sigmoid_mul_cpu,
    }
    for schema, function in schemas.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    for function in _RECURRENT:
        # A plain attribute of the namespace is enough, because these are called directly and never dispatched.
        setattr(torch.ops.sgl_kernel, function.__name__, function)
    for name in _LOOKED_UP_AT_IMPORT:
        setattr(torch.ops.sgl_kernel, name, device_only(f"torch.ops.sgl_kernel.{name}"))
    register.library = library  # torch drops the ops when the library object is collected
