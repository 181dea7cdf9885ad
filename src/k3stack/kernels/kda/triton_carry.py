"""KDA of chunks, the states from tile to tile, in Triton (``triton_ring`` does the same for few states)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def carry_kernel(
    w, u, k, fade, states, sequences, kept, corrected, count, state_block,
    K: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through the tiles of one sequence: the state before each, corrected values."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(sequences + sequence)
    tiles = tl.load(sequences + count + sequence)
    block = tl.load(sequences + 4 * count + sequence)
    i = tl.arange(0, K)
    r = tl.arange(0, C)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    place = states + block * state_block + head * K * K + i[:, None] * K + j[None, :]
    s = tl.load(place).to(tl.float32)
    for n in range(tiles):
        tile = (first + n) * heads + head
        at = tile * C * K + r[:, None] * K
        wt = tl.load(w + at + i[None, :])
        ut = tl.load(u + at + j[None, :])
        kt = tl.load(k + at + i[None, :])
        faded = tl.load(fade + tile * K + i)
        rounded = s.to(wt.dtype)
        tl.store(kept + tile * K * K + i[:, None] * K + j[None, :], rounded)
        d = (ut.to(tl.float32) - tl.dot(wt, rounded, input_precision=PRECISION)).to(wt.dtype)
        tl.store(corrected + at + j[None, :], d)
        s = tl.dot(tl.trans(kt), d, s * faded[:, None], input_precision=PRECISION)
    tl.store(place, s.to(states.dtype.element_ty))
