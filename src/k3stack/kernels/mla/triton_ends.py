"""What surrounds the attention of a decode step in Triton: cache rows and the query's norm before it, queries brought
to the latent and contexts back from it. Weights are on their way before the inputs are there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.norm.triton import rms

MOST = 64
"""Tokens up to which these kernels are taken; cuBLAS has more."""
COLUMNS, OUTPUTS, PARTS = 64, 16, 4
"""Latent columns and outputs of one program; parts that a latent is summed up in, each by a warp."""


@triton.jit
def _write_row(
    kv, weight, rows, pages, places, kv_row, page_stride, token, eps,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    page = tl.load(pages + token)
    if page >= 0:
        c = tl.arange(0, WIDE)
        r = tl.arange(0, SHARED)
        inside = c < LATENT
        to = rows + page * page_stride + tl.load(places + token) * (LATENT + SHARED)
        value = tl.load(kv + token * kv_row + c, mask=inside, other=0.0)
        y = rms(value, tl.load(weight + c, mask=inside, other=0.0), LATENT, eps)
        tl.store(to + c, y.to(rows.dtype.element_ty), mask=inside)
        tl.store(to + LATENT + r, tl.load(kv + token * kv_row + LATENT + r).to(rows.dtype.element_ty))


@triton.jit
def _write_kernel(
    kv, weight, rows, pages, places, kv_row, page_stride, eps,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    _write_row(kv, weight, rows, pages, places, kv_row, page_stride, token, eps, LATENT, WIDE, SHARED)


@triton.jit
def _enter_kernel(
    kv, weight, rows, pages, places, q, q_weight, normed, kv_row, page_stride, q_row, q_width, eps,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr, QUERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one token: its cache row (program 0), or its query's norm."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _write_row(kv, weight, rows, pages, places, kv_row, page_stride, token, eps, LATENT, WIDE, SHARED)
    else:
        c = tl.arange(0, QUERY)
        inside = c < q_width
        value = tl.load(q + token * q_row + c, mask=inside, other=0.0)
        y = rms(value, tl.load(q_weight + c, mask=inside, other=0.0), q_width, eps)
        tl.store(normed + token * q_width + c, y, mask=inside)


@triton.jit
def _absorb_kernel(
    q, kv_b, out, count, q_row, q_head, kv_head,
    NOPE: tl.constexpr, LATENT: tl.constexpr, T: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N latent columns of T queries of one head."""
    head = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * N + tl.arange(0, N)
    t = tl.program_id(2) * T + tl.arange(0, T)
    k = tl.arange(0, NOPE)
    inside = (c < LATENT)[None, :]
    w = tl.load(kv_b + head * kv_head + k[:, None] * LATENT + c[None, :], mask=inside, other=0.0)
    await_inputs(PDL)
    live = (t < count)[:, None]
    x = tl.load(q + t[:, None] * q_row + head * q_head + k[None, :], mask=live, other=0.0)
    y = tl.dot(x, w, input_precision="ieee")
    at = out + (head * count + t[:, None]) * LATENT + c[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=live & inside)


@triton.jit
def _project_kernel(
    context, kv_b, gate, out, count, heads, kv_head, gate_row,
    NOPE: tl.constexpr, V: tl.constexpr, LATENT: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N outputs of T contexts of one head, times the gate's sigmoid. Each warp sums up a part of the latent."""
    head = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    t = tl.program_id(2) * T + tl.arange(0, T)
    part = tl.arange(0, PARTS)[:, None, None] * PART
    k = tl.arange(0, PART)
    w_at = part + k[None, None, :]
    x_at = part + k[None, :, None]
    w = kv_b + head * kv_head + (NOPE + n)[None, :, None] * LATENT + w_at
    w = tl.load(w, mask=(n < V)[None, :, None] & (w_at < LATENT), other=0.0)
    await_inputs(PDL)
    x = context + (head * count + t)[None, None, :] * LATENT + x_at
    x = tl.load(x, mask=(t < count)[None, None, :] & (x_at < LATENT), other=0.0)
    y = tl.sum(tl.dot(w, x, input_precision="ieee"), 0).to(out.dtype.element_ty)
    live = (n < V)[:, None] & (t < count)[None, :]
    if GATED:
        g = tl.load(gate + t[None, :] * gate_row + head * V + n[:, None], mask=live, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) / (1 + tl.exp(-g))).to(out.dtype.element_ty)
    tl.store(out + (t[None, :] * heads + head) * V + n[:, None], y, mask=live)


def fits(tokens: int, nope: int) -> bool:
    """Whether ``absorb`` and ``project`` serve so many tokens and such heads."""
    return tokens <= MOST and nope >= 16 and nope & (nope - 1) == 0


def write_rows(kv: Tensor, weight: Tensor, eps: float, rows: Tensor, pages: Tensor, places: Tensor) -> None:
    """Normalise the latent of ``kv`` [T, latent + shared] and write its rows; see ``cpu.write_rows``. Page -1: none."""
    start.launch(
        _write_kernel,
        (kv.shape[0],),
        *(kv, weight, rows, pages, places, kv.stride(0), rows.stride(0), eps),
        **_widths(kv, weight),
        num_warps=1,
    )


def enter(
    kv: Tensor, weight: Tensor, eps: float, rows: Tensor, pages: Tensor, places: Tensor, q: Tensor, q_weight: Tensor
) -> Tensor:
    """``write_rows``, and ``norm.reference.rms_norm`` of q [T, width] in one."""
    tokens, width = q.shape
    normed = torch.empty(tokens, width, dtype=q.dtype, device=q.device)
    start.launch(
        _enter_kernel,
        (tokens, 2),
        *(kv, weight, rows, pages, places, q, q_weight, normed),
        *(kv.stride(0), rows.stride(0), q.stride(0), width, eps),
        **_widths(kv, weight),
        QUERY=triton.next_power_of_2(width),
        num_warps=4,
    )
    return normed


def _widths(kv: Tensor, weight: Tensor) -> dict[str, int]:
    latent = weight.shape[0]
    return {"LATENT": latent, "WIDE": triton.next_power_of_2(latent), "SHARED": kv.shape[1] - latent}


def absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """Queries against cache rows: the first ``nope`` columns of q [T, H, D] times kv_b [H, nope + v, latent]'s first
    rows -> [H, T, latent]."""
    count, heads, _ = q.shape
    latent = kv_b.shape[2]
    out = torch.empty(heads, count, latent, dtype=q.dtype, device=q.device)
    tokens = min(max(triton.next_power_of_2(count), 16), MOST)
    start.launch(
        _absorb_kernel,
        (heads, triton.cdiv(latent, COLUMNS), triton.cdiv(count, tokens)),
        *(q, kv_b, out, count, q.stride(0), q.stride(1), kv_b.stride(0)),
        NOPE=nope,
        LATENT=latent,
        T=tokens,
        N=COLUMNS,
        num_warps=4,
    )
    return out


def project(context: Tensor, kv_b: Tensor, nope: int, gate: Tensor | None) -> Tensor:
    """Contexts [H, T, latent] times the other rows of kv_b, by the sigmoid of ``gate`` [T, H v] where there is one
    (``activation.reference.output_gate``) -> [T, H v]."""
    heads, count, latent = context.shape
    v = kv_b.shape[1] - nope
    out = torch.empty(count, heads * v, dtype=context.dtype, device=context.device)
    tokens = min(max(triton.next_power_of_2(count), 16), MOST)
    start.launch(
        _project_kernel,
        (heads, triton.cdiv(v, OUTPUTS), triton.cdiv(count, tokens)),
        *(context, kv_b, context if gate is None else gate, out, count, heads, kv_b.stride(0)),
        0 if gate is None else gate.stride(0),
        NOPE=nope,
        V=v,
        LATENT=latent,
        PART=max(triton.next_power_of_2(triton.cdiv(latent, PARTS)), 16),
        PARTS=PARTS,
        T=tokens,
        N=OUTPUTS,
        GATED=gate is not None,
        num_warps=PARTS,
    )
    return out
