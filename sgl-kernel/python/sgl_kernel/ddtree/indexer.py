"""The indexer of DeepSeek's sparse attention with bfloat16 keys: storing keys, and the scores that select among them."""

import torch

_ops = torch.ops.sgl_kernel


def index_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Score every key of each request against the request's R query rows.

        out[r * R + i, t] = sum over heads h of weights[r * R + i, h] * max(q[r * R + i, h] . key t of request r, 0)

    Lengths and pages are read on the device and nothing is allocated, so one captured call serves every replay of the
    same shape. The R rows of a request share each read of a key. A row's logits are the same bits whatever the rest of
    the batch is.

    Args:
        q: [bs * R, H, 128] bfloat16, the index queries after rotation: R of 1 to 4 rows per request, the rows of a
            request in sequence. H is a multiple of 8, at most 64. Strides are multiples of 16 bytes, the last one is 1.
        keys: [pages, page_size, 128] bfloat16, the index keys of one layer. A page is contiguous and holds a multiple
            of 32 keys. The stride between pages is a multiple of 16 bytes.
        weights: [bs * R, H] float32, with every scale of the model folded in. They may be negative. The last stride is
            1, and the stride between rows a multiple of 8 bytes.
        seq_lens: [bs * R] int32, the keys that each row sees, from 0 to the smaller of max_len and
            pages_per_request * page_size. On CUDA a longer length counts as that limit, a negative one as 0.
        page_table: [bs, pages_per_request] int32, the pages of each request. Entries past the request's longest row
            are not read. The last stride is 1. A table with one line per row is passed as page_table[::R].
        out: [bs * R, max_len] float32 to write into. The last stride is 1. Entries from the row's length on are left as
            they are, as in DeepGEMM's logits that are not cleaned: whoever selects from them needs the lengths.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, device, shape or stride, or (CPU) a wrong length or page. The message
            names the argument, what was expected and what was given.

    Source: the lightning indexer of DeepSeek-V3.2 and V4 (DeepSeek-V3.2 report, arXiv 2512.02556, section 2).
    """
    _ops.ddtree_index_logits(q, keys, weights, seq_lens, page_table, out)
    return out


def store_index_keys(
    kv: torch.Tensor,
    plan: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    freqs: torch.Tensor,
    out_loc: torch.Tensor,
    keys: torch.Tensor,
    *,
    decode: bool,
) -> None:
    """Normalize and rotate the compressor's output, round it to bfloat16 and store it: one key for four tokens.

    Each row is divided by its root mean square and multiplied by norm_weight. Its last 64 dimensions are rotated in
    neighbouring pairs by the angles of position seq_len - 4. There is no Hadamard rotation, which serves the fp8 and
    fp4 formats: the queries must go without it too. Rows whose seq_len is not a positive multiple of 4 have no key.
    These are a decode step's requests between two keys and the padding of a prefill plan, whose seq_len is -1. The rest
    of the pool is left as it is.

    Plan and slots are read on the device and nothing is allocated, so one captured call serves every replay of the same
    shape.

    Args:
        kv: [rows, 128] float32, the compressor's output. The last stride is 1, the other one a multiple of 4.
        plan: [rows, 16] uint8, contiguous: the plan from which kv was made. SGLang keeps it as CompressorDecodePlan[1]
            or CompressorPrefillPlan[1].
        norm_weight: [128] float32.
        norm_eps: added to the mean square, 0 or more.
        freqs: [positions, 64] float32, cosine and sine of each position's 32 angles in turn. The last stride is 1, the
            other one a multiple of 4.
        out_loc: [tokens] int64, the slots of the step's tokens: page * page_size + offset. Only those of tokens that
            complete a key are read.
        keys: [pages, page_size, 128] bfloat16 to write into, as in index_logits.
        decode: the plan is a CompressorDecodePlan, where row i is token i. Otherwise the plan names the token.

    On CUDA, a row whose token, position or slot is out of range is not stored.

    Raises:
        ValueError: an argument has a wrong dtype, device, shape or stride, or (CPU) a token, position or slot is out of
            range. The message names the argument, what was expected and what was given.

    Source: the indexer's keys of DeepSeek-V4's C4 layers; the plan is that of SGLang 0.5.23
    (kernels/jit/csrc/deepseek_v4/c_plan.cuh).
    """
    _ops.ddtree_store_index_keys(kv, plan, norm_weight, norm_eps, freqs, out_loc, keys, decode)


# The ops check shapes themselves (csrc/indexer/api.cc). There is nothing to compute for fake or meta tensors.
@torch.library.register_fake("sgl_kernel::ddtree_index_logits")
@torch.library.register_fake("sgl_kernel::ddtree_store_index_keys")
def _(*args: object) -> None:
    return None
