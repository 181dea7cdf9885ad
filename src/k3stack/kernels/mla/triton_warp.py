"""MLA decode of up to eight heads in Gluon, which is Triton with layouts of one's own: programs of one warp each.

Both products are formed transposed, cache rows by heads, so that heads are the eight columns of a matrix instruction.
A warp then holds the contexts of eight heads in its registers, takes whole tiles of rows from scores to contexts, and
waits for no other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from k3stack.kernels.launch import await_inputs

HEADS = 8
"""Heads of one program."""
TOKENS = 16
"""Cache rows of one pass: the rows of a matrix instruction."""
STAGES = {1: 4, 2: 2}
"""Tiles of rows in shared memory, one of which is read while the others come, by the bytes of a cached value. Two of
fp8 are too few bytes under way for caches that are far apart in memory."""
CHAINS = {1: 8, 2: 2}
"""Parts of a row's latent whose products with the query are issued in turn, by the bytes of a cached value."""
PROGRAMS = {1: 528, 2: 396}
"""Programs that the caches of many sequences are shared out to, by the bytes of a cached value: four and three a
multiprocessor of an H200. They read as fast as it lets them; more would have more to add up and begin less evenly."""
FEW, FEW_PROGRAMS = 4, 264
"""Sequences up to which as many are better."""
LAZY = 8.0
"""Powers of two by which a score may exceed the one that weights are relative to before all sums are scaled again."""

_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_A = gl.constexpr(gl.DotOperandLayout(0, _MMA.value, 2))
_B = gl.constexpr(gl.DotOperandLayout(1, _MMA.value, 2))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_LOG2E = gl.constexpr(1.4426950408889634)
_NEIGHBOURS = gl.constexpr("""
{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}
""")
EVEN_AND_ODD = gl.constexpr("""
{
.reg .b32 t; .reg .b16 a, b;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {a, b}, t;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}
""")


@gluon.jit
def _split(pairs, ASM: gl.constexpr):
    """Two neighbouring pairs of fp8 values each (int16) in fp16, in which they are exact: one pair and the other, or
    what is even in both and what is odd."""
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _ask(source, latents, shareds, at, COLUMNS: gl.constexpr, SHARED: gl.constexpr):
    """Have a tile of rows copied from ``source`` to place ``at``."""
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SHARED, SHARED // 8], [1, 1], [1, 0])
    ROW: gl.constexpr = COLUMNS + SHARED
    TOKENS: gl.constexpr = latents.shape[1]
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, _COPY))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, _COPY))
    async_copy.async_copy_global_to_shared(latents.index(at), source + (n[:, None] * ROW + c[None, :]))
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, NARROW))
    c = gl.arange(0, SHARED, gl.SliceLayout(0, NARROW))
    async_copy.async_copy_global_to_shared(shareds.index(at), source + COLUMNS + (n[:, None] * ROW + c[None, :]))
    async_copy.commit_group()


@gluon.jit
def _column(c, PAIRED: gl.constexpr):
    """The query's column that meets cache column ``c``: of paired ones, the first pair of four; the other is two on."""
    return 2 * c - c % 2 if PAIRED else c


@gluon.jit
def _query(q, here, scale, PAIRED: gl.constexpr):
    """Queries as the products take them: with pairs in fp16 and scaled, in whose range they are."""
    value = gl.load(q, mask=here, other=0.0)
    return (value.to(gl.float32) * scale).to(gl.float16) if PAIRED else value


@gluon.jit
def _scores(latent, shared, ql, qs, qs_next, CHAINS: gl.constexpr, PAIRED: gl.constexpr, HEADS: gl.constexpr):
    """Products of a tile's rows with the queries [tokens, heads]: two sums in turn, because one over all columns would
    take longer."""
    WIDTH: gl.constexpr = latent.shape[1] // CHAINS
    TOKENS: gl.constexpr = latent.shape[0]
    even = gl.zeros([TOKENS, HEADS], gl.float32, _MMA)
    odd = even
    if PAIRED:
        one, other = _split(shared.load(_A), _NEIGHBOURS)
        even = mma_v2(one, qs, even)
        odd = mma_v2(other, qs_next, odd)
    else:
        even = mma_v2(shared.load(_A), qs, even)
    for i in gl.static_range(CHAINS):
        k = latent.slice(i * WIDTH, WIDTH, dim=1).load(_A)
        q = ql.index(0).slice(i * WIDTH, WIDTH, dim=1).permute((1, 0)).load(_B)
        s = even if i % 2 == 0 else odd
        if PAIRED:
            one, other = _split(k, _NEIGHBOURS)
            s = mma_v2(one, q, s)
            s = mma_v2(other, ql.index(1).slice(i * WIDTH, WIDTH, dim=1).permute((1, 0)).load(_B), s)
        else:
            s = mma_v2(k, q, s)
        if i % 2 == 0:
            even = s
        else:
            odd = s
    return even + odd


@gluon.jit
def _pass(
    latent, shared, ql, qs, qs_next, sums, n0, end, scale,
    LAST: gl.constexpr, LAZY: gl.constexpr, CHAINS: gl.constexpr, PAIRED: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """One tile of rows. sums: the score that weights are relative to, the weights' sums token by token, and contexts of
    the even and of the odd columns (of the first and of the second half, where rows are in 16 bits). In the LAST tile
    rows from ``end`` on hold anything."""
    best, total, one, other = sums
    s = _scores(latent, shared, ql, qs, qs_next, CHAINS, PAIRED, HEADS)
    if not PAIRED:
        s *= scale
    if LAST:
        n = n0 + gl.arange(0, latent.shape[0], gl.SliceLayout(1, _MMA))
        s = gl.where((n < end)[:, None], s, -float("inf"))
    top = gl.maximum(best, gl.max(s, 0))
    if gl.max(top - best, 0) > LAZY:
        old = gl.exp2(best - top)[None, :]
        total = total * old
        one = one * old
        other = other * old
        best = top
    p = gl.exp2(s - best[None, :])
    total += p
    HALF: gl.constexpr = latent.shape[1] // 2
    if PAIRED:
        p = gl.convert_layout(p.to(gl.float16), _B)
        v = latent.permute((1, 0)).load(_A)
        if LAST:
            v = gl.where(n0 + gl.arange(0, latent.shape[0], gl.SliceLayout(0, _A))[None, :] < end, v, 0)
        v, v_other = _split(v, EVEN_AND_ODD)
    else:
        p = gl.convert_layout(p.to(latent.dtype), _B)
        v = latent.slice(0, HALF, dim=1).permute((1, 0)).load(_A)
        v_other = latent.slice(HALF, HALF, dim=1).permute((1, 0)).load(_A)
        if LAST:
            live = n0 + gl.arange(0, latent.shape[0], gl.SliceLayout(0, _A))[None, :] < end
            v = gl.where(live, v, 0.0)
            v_other = gl.where(live, v_other, 0.0)
    return best, total, mma_v2(v, p, one), mma_v2(v_other, p, other)


@gluon.jit
def _store(partial, logsum, to, here, sums, LATENT: gl.constexpr):
    """Contexts, one half after the other, and the logarithm of the weights' sum of one split."""
    best, total, one, other = sums
    total = gl.sum(total, 0)
    at = partial + to[None, :] * LATENT + gl.arange(0, LATENT // 2, gl.SliceLayout(1, _MMA))[:, None]
    gl.store(at, one / total[None, :], mask=here[None, :])
    gl.store(at + LATENT // 2, other / total[None, :], mask=here[None, :])
    gl.store(logsum + to, best / _LOG2E + gl.log(total), mask=here)


@gluon.jit
def attend_kernel(
    q_latent, q_shared, rows, table, lengths, partial, logsum,
    latent_head, latent_row, shared_row, shared_head, page_stride, table_row, heads, splits, scale,
    LATENT: gl.constexpr, SHARED: gl.constexpr, PAGE: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, CHAINS: gl.constexpr, LAZY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See ``triton.attend_latent``; rows of fp8 are given as pairs of values (int16). Of their contexts even columns
    come first, then odd ones. Grid: groups of HEADS heads, sequences, splits.

    Cache rows are read while the kernel before this one makes the queries (``launch.await_inputs``): what wrote them
    must come before that one."""
    KIND: gl.constexpr = rows.dtype.element_ty
    PAIRED: gl.constexpr = gl.int16 == KIND
    PER: gl.constexpr = 2 if PAIRED else 1
    WIDE: gl.constexpr = LATENT // PER
    NARROW: gl.constexpr = SHARED // PER
    first, row, split = gl.program_id(0) * HEADS, gl.program_id(1).to(gl.int64), gl.program_id(2)
    length = gl.load(lengths + row)
    tiles = gl.cdiv(length, TOKENS)
    begin, end = tiles * split // splits * TOKENS, gl.minimum(tiles * (split + 1) // splits * TOKENS, length)
    h = first + gl.arange(0, HEADS, gl.SliceLayout(0, _MMA))
    to = (row * heads + h) * splits + split
    if begin >= end:
        await_inputs(PDL)
        gl.store(logsum + to, gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, _MMA)), mask=h < heads)
        return
    latents = gl.allocate_shared_memory(KIND, [STAGES, TOKENS, WIDE], _ROWS)
    FOLDED: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // NARROW, NARROW // 8, [1, 0])
    shareds = gl.allocate_shared_memory(KIND, [STAGES, TOKENS, NARROW], FOLDED)
    pages = table + row * table_row
    final = begin + (end - 1 - begin) // TOKENS * TOKENS
    for i in gl.static_range(STAGES - 1):
        n0 = gl.minimum(begin + i * TOKENS, final)
        page = gl.load(pages + n0 // PAGE)
        _ask(rows + page * page_stride + n0 % PAGE * (WIDE + NARROW), latents, shareds, i, WIDE, NARROW)
    # Looked up a step ahead: rows whose page is being looked up could not be asked for in time.
    next_page = gl.load(pages + gl.minimum(begin + (STAGES - 1) * TOKENS, final) // PAGE)
    await_inputs(PDL)
    scale *= _LOG2E
    ql = gl.allocate_shared_memory(gl.float16 if PAIRED else KIND, [PER, HEADS, WIDE], _ROWS)
    own = first + gl.arange(0, HEADS, gl.SliceLayout(1, _COPY))
    c = _column(gl.arange(0, WIDE, gl.SliceLayout(0, _COPY)), PAIRED)
    for i in gl.static_range(PER):
        at = q_latent + own[:, None] * latent_head + row * latent_row + c[None, :] + 2 * i
        ql.index(i).store(_query(at, (own < heads)[:, None], scale, PAIRED))
    own = first + gl.arange(0, HEADS, gl.SliceLayout(0, _B))[None, :]
    c = _column(gl.arange(0, NARROW, gl.SliceLayout(1, _B)), PAIRED)[:, None]
    at = q_shared + own * shared_head + row * shared_row + c
    qs = _query(at, own < heads, scale, PAIRED)
    qs_next = _query(at + 2, own < heads, scale, PAIRED) if PAIRED else qs
    best = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, _MMA))
    context = gl.zeros([LATENT // 2, HEADS], gl.float32, _MMA)
    sums = best, gl.zeros([TOKENS, HEADS], gl.float32, _MMA), context, context
    at = 0
    for n0 in range(begin, final, TOKENS):
        async_copy.wait_group(STAGES - 2)
        ahead = gl.minimum(n0 + (STAGES - 1) * TOKENS, final)
        page = next_page
        next_page = gl.load(pages + gl.minimum(ahead + TOKENS, final) // PAGE)
        source = rows + page * page_stride + ahead % PAGE * (WIDE + NARROW)
        _ask(source, latents, shareds, (at + STAGES - 1) % STAGES, WIDE, NARROW)
        latent, shared = latents.index(at), shareds.index(at)
        sums = _pass(latent, shared, ql, qs, qs_next, sums, n0, end, scale, False, LAZY, CHAINS, PAIRED, HEADS)
        at = (at + 1) % STAGES
    async_copy.wait_group(0)
    latent, shared = latents.index(at), shareds.index(at)
    sums = _pass(latent, shared, ql, qs, qs_next, sums, final, end, scale, True, LAZY, CHAINS, PAIRED, HEADS)
    _store(partial, logsum, to, h < heads, sums, LATENT)


def fits(heads: int, latent: int, shared: int, page_rows: int) -> bool:
    """Whether the kernel serves these sizes: those of Kimi-K3 and Kimi-Linear, whose tiles fill its layouts."""
    return heads <= HEADS and (latent, shared) == (512, 64) and page_rows % TOKENS == 0


def programs(count: int, itemsize: int) -> int:
    """Programs that share out the caches of ``count`` sequences."""
    return FEW_PROGRAMS if count <= FEW else PROGRAMS[itemsize]


def options(itemsize: int) -> dict[str, int | float | bool]:
    """The kernel's compile-time arguments that do not depend on the model."""
    by_bytes = {"STAGES": STAGES[itemsize], "CHAINS": CHAINS[itemsize]}
    return {"HEADS": HEADS, "TOKENS": TOKENS, **by_bytes, "LAZY": LAZY, "num_warps": 1}
