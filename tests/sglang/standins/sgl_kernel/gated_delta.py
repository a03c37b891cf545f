"""Slow torch references of the linear-attention kernels that SGLang calls on a CPU (gated delta rule, causal
convolution)."""

import itertools

import torch
import torch.nn.functional as F

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]


def _activated(x, activation):
    return F.silu(x) if activation in ("silu", "swish", True) else x


def causal_conv1d_fn_cpu(
    x, weight, bias=None, conv_states=None, has_initial_state=None, cache_indices=None,
    query_start_loc=None, seq_lens_cpu=None, activation="silu", **_,
):  # fmt: skip
    """x [dim, T] -> [dim, T]; conv_states [slots, dim, width - 1] are changed in place."""
    dim, width = weight.shape
    out, start = torch.empty_like(x), 0
    for i, n in enumerate(map(int, seq_lens_cpu)):
        slot, rows = int(cache_indices[i]), x[:, start : start + n]
        before = conv_states[slot].to(x.dtype) if bool(has_initial_state[i]) else x.new_zeros(dim, width - 1)
        full = torch.cat([before, rows], dim=1)
        y = F.conv1d(full.unsqueeze(0), weight.unsqueeze(1).to(x.dtype), bias, groups=dim)[0]
        out[:, start : start + n] = _activated(y, activation)
        conv_states[slot].copy_(full[:, -(width - 1) :])
        start += n
    return out


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias=None, activation="silu", conv_state_indices=None, **_
):
    """x [B, dim] -> [B, dim]."""
    slots = conv_state_indices.long()
    full = torch.cat([conv_states[slots].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    y = (full * weight.to(x.dtype)).sum(-1)
    if bias is not None:
        y = y + bias
    conv_states[slots] = full[..., 1:].to(conv_states.dtype)
    return _activated(y, activation)


def _unit(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _delta(q, k, v, g, beta, state):
    """One sequence: q, k [T, H, K], v [T, HV, V], g, beta [T, HV]; state float32 [HV, V, K]."""
    steps, heads, width = q.shape
    repeat = v.shape[1] // heads
    q = _unit(q.float()).repeat_interleave(repeat, 1) * width**-0.5
    k = _unit(k.float()).repeat_interleave(repeat, 1)
    v, g, beta = v.float(), g.float().exp(), beta.float()
    out = torch.empty(steps, v.shape[1], v.shape[-1])
    for t in range(steps):
        state = state * g[t, :, None, None]
        update = (v[t] - (state * k[t, :, None, :]).sum(-1)) * beta[t, :, None]
        state = state + update[:, :, None] * k[t, :, None, :]
        out[t] = (state * q[t, :, None, :]).sum(-1)
    return out, state


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state=None, cu_seqlens=None, head_first=False,
    use_qk_l2norm_in_kernel=True, initial_state_indices=None, **_,
):  # fmt: skip
    """Packed sequences; initial_state [slots, HV, V, K] is changed in place."""
    q, k, v = q[0], k[0], v[0]
    g, beta = g.reshape(-1, v.shape[1]), beta.reshape(-1, v.shape[1])
    out, ends = torch.empty_like(v), cu_seqlens.tolist()
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        slot = int(initial_state_indices[i])
        rows, state = _delta(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], initial_state[slot].float())
        out[a:b] = rows.to(out.dtype)
        initial_state[slot].copy_(state)
    return out.unsqueeze(0), None, None


_lib = torch.library.Library("sgl_kernel", "FRAGMENT")


def _operator(schema, function):
    _lib.define(schema)
    _lib.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")


def _gating(A_log, a, b, dt_bias):
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


def _norm_gated(x, weight, z, eps):
    xf = x.float()
    y = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * y * F.silu(z.float())).to(x.dtype)


def _decode(A_log, dt_bias, q, k, v, a, b, source, indices, cu_seqlens, l2norm, beta, threshold):
    g, gate = _gating(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(q, k, v, g, gate, source, cu_seqlens, initial_state_indices=indices)[0]


_operator(
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)", _gating
)
_operator("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor", _norm_gated)
_operator(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, "
    "Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
    _decode,
)
_operator("fused_sigmoid_mul_cpu(Tensor x, Tensor gate) -> Tensor", lambda x, gate: x * torch.sigmoid(gate))
