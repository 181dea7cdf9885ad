"""The choice of experts in Triton, alone and with all else that follows the joined products of a block's input.

Chosen are those that fewer than k others surpass. To count that for every expert against every other takes too long, so
it is done for candidates: the threads are cut into groups, at least k of them, and what falls below any group's best is
none. Candidates (about 50 of 896, all of them at worst) are put into a list in shared memory, in any order, and counted
against one another; the number of those before it is a chosen one's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.launch import INTERPRETED, await_inputs
from k3stack.kernels.linear.triton import added_up

WARPS, EACH = 8, 4
"""The most that share out a token's experts, and the fewest experts of one thread."""
PIECE = 256
"""Values of the latent input, or of the shared MLP's activation, of one program."""
SHARERS = 4
"""Threads that count for one candidate."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A program's PTX: ``warps`` with ``each`` experts a thread choose ``top_k``. A thread is given ``each`` keys,
    scores and experts (-1: none), then the places of the token's ids and weights and the weights' factor. Keys are
    scores with bias, as integers of the same order; a list's entry has the key above the inverted expert, so that of
    equal keys the lower expert's is larger."""

    top_k: int
    warps: int
    each: int
    renormalize: bool

    def given(self, which: int) -> list[str]:
        """Registers of the ``which``-th input."""
        return [f"${self.each * (1 + which) + i}" for i in range(self.each)]

    def text(self) -> str:
        result = [f"mov.b32 ${i}, 0;" for i in range(self.each)]
        return "\n".join(["{", *self._room(), *self._least(), *self._listed(), *self._counted(), *self._written(),
                          *result, "}"])  # fmt: skip

    def _room(self) -> list[str]:
        """Registers, and shared memory whose list has entries below all others."""
        size = 32 * self.warps * self.each
        head = f"""
.reg .pred p, q, h; .reg .b32 t, lane, m, o, n, c, i, at, to, place, name; .reg .b64 mine, a, b, far;
.reg .f32 s, all, r;
.shared .align 16 .b64 list[{size}]; .shared .b32 raw[{size}]; .shared .b32 count;
.shared .b32 best[{self.warps}]; .shared .b32 names[{self.top_k}]; .shared .b32 kept[{self.top_k}];
mov.u32 t, %tid.x; and.b32 lane, t, 31;
mov.b64 a, 0x8000000000000000;
mov.u32 at, list; mad.lo.u32 at, t, {8 * self.each}, at;"""
        return [head, *(f"st.shared.b64 [at + {8 * i}], a;" for i in range(self.each))]

    def _least(self) -> list[str]:
        """m: the least of what each group of threads has as its best key."""
        lanes = min(32 * self.warps // triton.next_power_of_2(self.top_k), 32)
        keys = self.given(0)
        return [
            f"mov.b32 m, {keys[0]};",
            *(f"max.s32 m, m, {key};" for key in keys[1:]),
            *_over(lanes, "shfl.sync.bfly.b32 o, m, {}, 31, -1; max.s32 m, m, o;"),
            f"""
redux.sync.min.s32 m, m, -1;
setp.eq.u32 p, lane, 0; setp.eq.u32 q, t, 0;
mov.u32 at, best; shr.u32 o, t, 5; mad.lo.u32 at, o, 4, at;
@p st.shared.b32 [at], m;
mov.b32 o, 0;
@q st.shared.b32 [count], o;
bar.sync 0;
mov.u32 at, best; and.b32 o, lane, {self.warps - 1}; mad.lo.u32 at, o, 4, at;
ld.shared.b32 m, [at];
redux.sync.min.s32 m, m, -1;""",
        ]

    def _listed(self) -> list[str]:
        """Candidates in the list, their scores beside it; n: how many there are."""
        each = [
            f"""
setp.ge.s32 p, {key}, m; setp.ge.and.s32 p, {name}, 0, p;
@p atom.shared.add.u32 c, [count], 1;
not.b32 o, {name}; mov.b64 a, {{o, {key}}};
mov.u32 at, list; mad.lo.u32 at, c, 8, at; @p st.shared.b64 [at], a;
mov.u32 at, raw; mad.lo.u32 at, c, 4, at; @p st.shared.b32 [at], {score};"""
            for key, score, name in zip(self.given(0), self.given(1), self.given(2), strict=True)
        ]
        return [*each, "bar.sync 0;\nld.shared.b32 n, [count];"]

    def _counted(self) -> list[str]:
        """The chosen ones and their scores at their places. SHARERS threads have a candidate, of each two entries of
        the list in turn."""
        return [
            f"""
mov.b32 c, 0;
shr.u32 o, t, {SHARERS.bit_length() - 1};
more:
add.u32 to, c, o;
mov.u32 at, list; mad.lo.u32 at, to, 8, at; ld.shared.b64 mine, [at];
mov.b32 place, 0;
and.b32 i, t, {SHARERS - 1}; setp.eq.u32 h, i, 0; shl.b32 i, i, 1;
mov.u32 at, list; mad.lo.u32 at, i, 8, at;
next:
setp.lt.u32 q, i, n;
@!q bra counted;
ld.shared.v2.b64 {{a, b}}, [at];
setp.gt.s64 p, a, mine; @p add.u32 place, place, 1;
setp.gt.s64 p, b, mine; @p add.u32 place, place, 1;
add.u32 i, i, {2 * SHARERS}; add.u32 at, at, {16 * SHARERS};
bra next;
counted:""",
            *_over(SHARERS, "shfl.sync.bfly.b32 i, place, {}, 31, -1; add.u32 place, place, i;"),
            f"""
setp.lt.and.u32 p, to, n, h; setp.lt.and.u32 p, place, {self.top_k}, p;
mov.u32 at, raw; mad.lo.u32 at, to, 4, at; @p ld.shared.b32 s, [at];
mov.b64 {{name, i}}, mine; not.b32 name, name;
mov.u32 at, names; mad.lo.u32 at, place, 4, at; @p st.shared.b32 [at], name;
mov.u32 at, kept; mad.lo.u32 at, place, 4, at; @p st.shared.b32 [at], s;
add.u32 c, c, {32 * self.warps // SHARERS};
setp.lt.u32 q, c, n;
@q bra more;
bar.sync 0;""",
        ]

    def _written(self) -> list[str]:
        """Ids and weights, by the first warp; the number added to the sum is 1e-20."""
        ids, weights, factor = (self.given(i)[0] for i in (3, 4, 5))
        total = [
            "mov.b32 all, s;",
            *_over(32, "shfl.sync.bfly.b32 r, all, {}, 31, -1; add.f32 all, all, r;"),
            "add.f32 all, all, 0f1E3CE508; div.full.f32 s, s, all;",
        ]
        return [
            f"""
setp.ge.u32 p, t, 32;
@p bra done;
setp.lt.u32 p, lane, {self.top_k};
mov.b32 s, 0;
mov.u32 at, kept; mad.lo.u32 at, lane, 4, at; @p ld.shared.b32 s, [at];
mov.u32 at, names; mad.lo.u32 at, lane, 4, at; @p ld.shared.b32 name, [at];""",
            *(total if self.renormalize else []),
            f"""
mul.f32 s, s, {factor};
cvt.s64.s32 a, name;
mad.wide.u32 far, lane, 8, {ids}; @p st.global.b64 [far], a;
mad.wide.u32 far, lane, 4, {weights}; @p st.global.b32 [far], s;
done:""",
        ]


def _over(lanes: int, text: str) -> list[str]:
    """``text`` for each step of an exchange between so many neighbouring threads."""
    return [text.format(1 << i) for i in range(lanes.bit_length() - 1)]


@lru_cache
def _selection(top_k: int, warps: int, each: int, renormalize: bool) -> str:
    return Selection(top_k, warps, each, renormalize).text()


@triton.jit
def _experts(BLOCK: tl.constexpr):
    """Numbers up to BLOCK in an order by which each group of threads has some of those that are experts."""
    j = tl.arange(0, BLOCK)
    return j % 8 * (BLOCK // 8) + j // 8


@triton.jit
def _route(
    logits, biased, ids, weights, experts, scaling, apart,
    TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, ASM: tl.constexpr,
    KINDS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The choice of one token by its ``logits``; ``biased`` [BLOCK] are the biases."""
    e = _experts(BLOCK)
    live = e < experts
    s = 1 / (1 + tl.exp(-added_up(logits + e, live, apart, SHARES)))
    bits = (s + biased).to(tl.int32, bitcast=True)
    key = tl.where(live, bits ^ ((bits >> 31) & 2147483647), -2147483648)
    if ASM is not None:
        tl.inline_asm_elementwise(
            ASM,
            KINDS,
            [key, s, tl.where(live, e, -1), ids.to(tl.int64), weights.to(tl.int64), scaling],
            dtype=tl.int32,
            is_pure=False,
            pack=EACH,
        )
    else:
        before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (e[None, :] < e[:, None]))
        place = tl.sum(before.to(tl.int32), 1)
        chosen = live & (place < TOPK)
        if RENORMALIZE:
            s = s / (tl.sum(tl.where(chosen, s, 0.0), 0) + 1e-20)
        tl.store(ids + place, e.to(tl.int64), mask=chosen)
        tl.store(weights + place, s * scaling, mask=chosen)


@triton.jit
def _biases(bias, experts, BLOCK: tl.constexpr):
    e = _experts(BLOCK)
    return tl.load(bias + e, mask=e < experts, other=0.0)


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, experts, scaling,
    TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, ASM: tl.constexpr,
    KINDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    biased = _biases(bias, experts, BLOCK)
    await_inputs(PDL)
    _route(
        logits + token * experts, biased, ids + token * TOPK, weights + token * TOPK, experts, scaling, 0,
        TOPK, RENORMALIZE, BLOCK, EACH, ASM, KINDS, 1,
    )  # fmt: skip


@triton.jit
def _choose_kernel(
    products, bias, ids, weights, latent, hidden, row, apart, experts, latent_width, inner, scaling, beta, linear_beta,
    TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, ASM: tl.constexpr,
    KINDS: tl.constexpr, PIECE: tl.constexpr, SITU: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one token: the choice (program 0), a piece of the latent input, or of the shared MLP's activation."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pieces = tl.cdiv(latent_width, PIECE)
    products += token * row
    if part == 0:
        biased = _biases(bias, experts, BLOCK)
        await_inputs(PDL)
        _route(
            products, biased, ids + token * TOPK, weights + token * TOPK, experts, scaling, apart,
            TOPK, RENORMALIZE, BLOCK, EACH, ASM, KINDS, SHARES,
        )  # fmt: skip
    elif part <= pieces:
        await_inputs(PDL)
        at = (part - 1) * PIECE + tl.arange(0, PIECE)
        value = added_up(products + experts + at, at < latent_width, apart, SHARES)
        tl.store(latent + token * latent_width + at, value.to(latent.dtype.element_ty), mask=at < latent_width)
    else:
        await_inputs(PDL)
        at = (part - 1 - pieces) * PIECE + tl.arange(0, PIECE)
        own = products + experts + latent_width + at
        kind = hidden.dtype.element_ty
        gate = added_up(own, at < inner, apart, SHARES).to(kind).to(tl.float32)
        up = added_up(own + inner, at < inner, apart, SHARES).to(kind).to(tl.float32)
        y = glu(gate, up, beta, linear_beta, SITU)
        tl.store(hidden + token * inner + at, y.to(kind), mask=at < inner)


def _options(experts: int, top_k: int, renormalize: bool) -> dict[str, Any]:
    """How a token's experts are shared out to warps, and what these do."""
    block = max(triton.next_power_of_2(experts), 32 * EACH)
    warps = min(WARPS, block // (32 * EACH))
    each = block // (32 * warps)
    kinds = ",".join(["=r"] * each + [kind for kind in "rfrllf" for _ in range(each)])
    asm = None if INTERPRETED or top_k > 32 else _selection(top_k, warps, each, renormalize)
    shared = {"TOPK": top_k, "RENORMALIZE": renormalize, "BLOCK": block, "EACH": each}
    return shared | {"ASM": asm, "KINDS": kinds, "num_warps": warps}


def route(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float, renormalize: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference.route``; the best first, of equal ones the lower id. logits fp32."""
    tokens, experts = logits.shape
    if forced is not None:
        weights = torch.sigmoid(logits).gather(1, forced)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return forced, weights * scaling
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    start.launch(
        _route_kernel,
        (tokens,),
        *(logits, bias, ids, weights, experts, scaling),
        **_options(experts, top_k, renormalize),
    )
    return ids, weights


def choose(
    products: Tensor,
    bias: Tensor,
    sizes: tuple[int, int, int],
    activation: Glu,
    top_k: int,
    scaling: float,
    renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What follows the products fp32 [T, sum of sizes], or [S, T, sum of sizes] that are still to be added up: the
    router's (see ``route``), the latent input's, and gate and up of the shared MLP. ids int64 and weights [T, top_k];
    latent input and the MLP's activation in bfloat16."""
    if products.dim() == 2:
        products = products.unsqueeze(0)
    (shares, tokens, _), (experts, latent_width, double) = products.shape, sizes
    device, inner = products.device, double // 2
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    latent, hidden = (torch.empty(tokens, n, dtype=torch.bfloat16, device=device) for n in (latent_width, inner))
    start.launch(
        _choose_kernel,
        (tokens, 1 + triton.cdiv(latent_width, PIECE) + triton.cdiv(inner, PIECE)),
        *(products, bias, ids, weights, latent, hidden, products.stride(1), products.stride(0)),
        *(experts, latent_width, inner),
        *(scaling, activation.beta, activation.linear_beta),
        PIECE=PIECE,
        SITU=activation.kind == "situ",
        SHARES=shares,
        **_options(experts, top_k, renormalize),
    )
    return ids, weights, latent, hidden
