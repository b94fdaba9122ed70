"""The recurrent layers of hybrid models on a CPU without AMX, in torch: gated delta rule, Mamba2, short convolution.

Each function is the recurrence, token by token. It serves tests and trials, not speed. Sums and states are float32.
Names and arguments are those that SGLang 0.5.23 uses.
"""

from typing import Any

import torch
import torch.nn.functional as F

_NORM_EPS = 1e-6


def _per_sequence(query_start_loc: torch.Tensor, slots: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (first token, end, slot) of each sequence that has a slot and tokens."""
    bounds = query_start_loc.tolist()
    spans = zip(bounds[:-1], bounds[1:], slots.tolist())
    return [(start, end, slot) for start, end, slot in spans if slot >= 0 and end > start]


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation: expected 'silu', 'swish' or None, got {activation!r}")
    return x if activation is None else F.silu(x)


def _convolve(
    window: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Convolve each channel over time: window [dim, width - 1], x [dim, tokens] -> [dim, tokens] float32."""
    inputs = torch.cat([window.to(x.dtype), x], dim=1).float()
    out = (inputs.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1)
    return out if bias is None else out + bias.float()[:, None]


def causal_conv1d_fn_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, conv_states: torch.Tensor,
    query_start_loc: torch.Tensor, cache_indices: torch.Tensor, has_initial_state: torch.Tensor | None = None,
    activation: str | None = None, **unused: Any,
) -> torch.Tensor:  # fmt: skip
    """Convolve prompts, each after its stored window, and store the windows at their ends.

    Args:
        x: [dim, tokens], one sequence after the other.
        weight: [dim, width].
        bias: [dim] or None.
        conv_states: [slots, dim, width - 1], written in place.
        query_start_loc: [sequences + 1], where each sequence starts.
        cache_indices: [sequences], slots; negative: none.
        has_initial_state: [sequences] bool; a sequence without one starts from zeros. None: none has one.
        activation: "silu", "swish" or None.

    Returns:
        [dim, tokens] of x's dtype.
    """
    out = torch.zeros_like(x)
    width = conv_states.shape[-1]
    started = [False] * len(cache_indices) if has_initial_state is None else has_initial_state.tolist()
    fresh = {slot for slot, has_state in zip(cache_indices.tolist(), started) if not has_state}
    for start, end, slot in _per_sequence(query_start_loc, cache_indices):
        window = torch.zeros_like(conv_states[slot]) if slot in fresh else conv_states[slot].clone()
        inputs = x[:, start:end]
        out[:, start:end] = _activated(_convolve(window, inputs, weight, bias), activation).to(x.dtype)
        conv_states[slot] = torch.cat([window, inputs.to(window.dtype)], dim=1)[:, -width:]
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, conv_state_indices: torch.Tensor | None = None, **unused: Any,
) -> torch.Tensor:  # fmt: skip
    """Convolve one token per request and advance the windows.

    Args:
        x: [bs, dim].
        conv_state: [slots, dim, width - 1], written in place.
        weight: [dim, width].
        bias: [dim] or None.
        activation: "silu", "swish" or None.
        conv_state_indices: [bs], slots; negative: none. None: request i has slot i.

    Returns:
        [bs, dim] of x's dtype; zeros for a request without a slot.
    """
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices
    starts = torch.arange(len(x) + 1)
    started = torch.ones(len(x), dtype=torch.bool)
    return causal_conv1d_fn_cpu(
        x.T,
        weight,
        bias,
        conv_states=conv_state,
        query_start_loc=starts,
        cache_indices=slots,
        has_initial_state=started,
        activation=activation,
    ).T


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GDN's gates.

    Args:
        A_log, dt_bias: [h_v].
        a, b: [tokens, h_v].

    Returns:
        The logarithm of the decay, and beta: [1, tokens, h_v] float32 each.
    """
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
    head_first: bool = False, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, None, None]:  # fmt: skip
    """Run the gated delta rule over sequences, each from its stored state, and store the states at their ends.

    Args:
        q, k: [1, tokens, h_k, d_k].
        v: [1, tokens, h_v, d_v]. Value head h uses q and k of head h // (h_v / h_k).
        g, beta: [1, tokens, h_v] float32, of fused_gdn_gating_cpu().
        initial_state: [slots, h_v, d_v, d_k], written in place.
        initial_state_indices: [sequences], slots; negative: none.
        cu_seqlens: [sequences + 1], where each sequence starts.
        head_first: must be False.
        use_qk_l2norm_in_kernel: normalize q and k first.

    Returns:
        [1, tokens, h_v, d_v] of v's dtype. The places of the final states and of those per chunk are None.

    Source: gated delta rule (arXiv 2412.06464).
    """
    if head_first:
        raise ValueError("head_first: expected False, got True")
    groups = v.shape[2] // q.shape[2]
    queries, keys, values = (x[0].float() for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        queries, keys = _normalized(queries), _normalized(keys)
    queries = (queries * q.shape[-1] ** -0.5).repeat_interleave(groups, 1)
    keys = keys.repeat_interleave(groups, 1)
    decays, betas = g[0].float().exp(), beta[0].float()
    out = torch.zeros_like(values)
    for start, end, slot in _per_sequence(cu_seqlens, initial_state_indices):
        state = initial_state[slot].float()
        for t in range(start, end):
            state = state * decays[t, :, None, None]
            predicted = torch.einsum("hvk,hk->hv", state, keys[t])
            update = betas[t, :, None] * (values[t] - predicted)
            state = state + update[:, :, None] * keys[t][:, None]
            out[t] = torch.einsum("hvk,hk->hv", state, queries[t])
        initial_state[slot] = state.to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, initial_state_source: torch.Tensor, initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor, use_qk_l2norm_in_kernel: bool, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:  # fmt: skip
    """Run GDN over one token per request.

    Args:
        softplus_beta, softplus_threshold: must be 1 and 20, torch's defaults.
        others: as in fused_gdn_gating_cpu() and chunk_gated_delta_rule_cpu().

    Returns:
        [1, tokens, h_v, d_v] of v's dtype.
    """
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise ValueError(
            f"softplus_beta, softplus_threshold: expected 1.0 and 20.0, got {softplus_beta} and "
            f"{softplus_threshold}"
        )
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state_source,
        initial_state_indices,
        cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute rms_norm(x) * weight * silu(gate), all [rows, d], in float32; the result has x's dtype."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normalized * weight.float() * F.silu(gate.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, h_k: int, h_v: int, d_k: int, d_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the input projections of a GDN layer.

    Args:
        qkvz: [tokens, 2 h_k d_k + 2 h_v d_v]: q, k, v and z.
        ba: [tokens, 2 h_v]: b and a.
        h_k, h_v, d_k, d_v: heads and head sizes.

    Returns:
        q, k and v together, z as [tokens, h_v, d_v], b and a.
    """
    mixed, z = qkvz.split([2 * h_k * d_k + h_v * d_v, h_v * d_v], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return mixed.contiguous(), z.reshape(len(z), h_v, d_v), b.contiguous(), a.contiguous()


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, d: int) -> torch.Tensor:
    heads = x.reshape(-1, d).float()
    normalized = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return (normalized * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalize each head of q and k, [tokens, heads * d] to [tokens * heads, d], with weights that are stored minus 1."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    head_dim: int, heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As fused_qk_gemma_rmsnorm_cpu(), from [tokens, heads * 2 d], where each head holds q and then its gate.

    Returns:
        q, k and the gate, [tokens * heads, d] each.
    """
    q, gate = q_gate.reshape(-1, heads, 2 * head_dim).chunk(2, dim=-1)
    normalized = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *normalized, gate.reshape(-1, head_dim).contiguous()


def selective_state_update_cpu(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, z: None = None, dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False, state_batch_indices: torch.Tensor | None = None, *, out: torch.Tensor,
) -> None:  # fmt: skip
    """Run Mamba2 over one token per request.

    Args:
        state: [slots, h, d, n], written in place.
        x, dt: [bs, h, d].
        A: [h, d, n], negative.
        B, C: [bs, groups, n]. Head i uses group i // (h / groups).
        D, dt_bias: [h, d] or None.
        z: must be None.
        dt_softplus: apply softplus to dt + dt_bias.
        state_batch_indices: [bs], slots; negative: none. None: request i has slot i.
        out: [bs, h, d], written.

    Source: Mamba2 (arXiv 2405.21060).
    """
    if z is not None:
        raise ValueError("z: expected None, got a tensor: the gate is applied by the norm")
    slots = torch.arange(len(x)) if state_batch_indices is None else state_batch_indices
    heads = x.shape[1]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = F.softplus(step) if dt_softplus else step
    keys, queries = (m.float().repeat_interleave(heads // m.shape[1], 1) for m in (B, C))
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        new = state[slot].float() * (step[i, :, :, None] * A.float()).exp()
        new = new + (step[i] * x[i].float())[:, :, None] * keys[i][:, None]
        result = torch.einsum("hdn,hn->hd", new, queries[i])
        out[i] = (result if D is None else result + D.float() * x[i].float()).to(out.dtype)
        state[slot] = new.to(state.dtype)


def mamba_chunk_scan_cpu(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int, *,
    cu_seqlens: torch.Tensor, out: torch.Tensor, D: torch.Tensor | None = None, z: None = None,
    dt_bias: torch.Tensor | None = None, initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False, state_dtype: torch.dtype | None = None, **unused: Any,
) -> tuple[None, torch.Tensor, None]:  # fmt: skip
    """Run Mamba2 over sequences.

    Args:
        x: [1, tokens, h, d].
        dt: [1, tokens, h].
        A: [h], negative.
        B, C: [1, tokens, groups, n].
        chunk_size: unused.
        cu_seqlens: [sequences + 1], where each sequence starts.
        out: [1, tokens, h, d], written.
        D, dt_bias: [h] or None.
        z: must be None.
        initial_states: [sequences, h, d, n] or None for zeros.
        dt_softplus: apply softplus to dt + dt_bias.
        state_dtype: the dtype of the result; None takes x's.

    Returns:
        The states at the sequences' ends, [sequences, h, d, n], between two Nones: no states inside a prompt.
    """
    heads, size, order = *x.shape[2:], B.shape[-1]
    wide = dict(
        A=A.float()[:, None, None].expand(heads, size, order),
        D=None if D is None else D[:, None].expand(heads, size),
        dt_bias=None if dt_bias is None else dt_bias[:, None].expand(heads, size),
    )
    bounds = cu_seqlens.tolist()
    states = torch.zeros(len(bounds) - 1, heads, size, order)
    if initial_states is not None:
        states.copy_(initial_states)
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        for t in range(start, end):
            selective_state_update_cpu(
                states[i : i + 1],
                x[0, t : t + 1],
                dt[0, t : t + 1, :, None].expand(-1, -1, size),
                wide["A"],
                B[0, t : t + 1],
                C[0, t : t + 1],
                wide["D"],
                dt_bias=wide["dt_bias"],
                dt_softplus=dt_softplus,
                out=out[0, t : t + 1],
            )
    return None, states.to(state_dtype or x.dtype), None
