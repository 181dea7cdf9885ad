"""Every Triton kernel as Kimi-K3 (a rank of 16 GPUs) and Kimi-Linear launch it, compiled for sm_90 without a GPU.

The kernels' own Python functions are called with tensors that have no storage; where they would start a kernel, it is
compiled for the arguments at hand instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3stack.kernels import launch as starter
from k3stack.kernels.activation import triton as activation
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.kda import triton as kda
from k3stack.kernels.kda import triton_chunk as kda_chunk
from k3stack.kernels.kda.layout import ChunkTiles
from k3stack.kernels.linear import ring, triton_one
from k3stack.kernels.linear import triton as linear
from k3stack.kernels.mla import triton as mla
from k3stack.kernels.mla import triton_ends as mla_ends
from k3stack.kernels.moe import triton as moe
from k3stack.kernels.moe import triton_route
from k3stack.kernels.mxfp4.weight import Mxfp4Weight
from k3stack.kernels.norm import triton as norm
from k3stack.kernels.residual import triton as residual
from k3stack.kernels.sampling import triton as sampling

SHARED_LIMIT = 227 * 1024
"""Shared memory of one program on an H200."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def compile_launch(kernel: Any, *args: Any, **options: Any) -> Any:
    """Compile ``kernel`` for these arguments as a launch would."""
    names = list(inspect.signature(kernel.fn).parameters)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (name, value) in enumerate(zip(names, args, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    given = {k: options.pop(k) for k in OPTIONS if k in options}
    for name, value in options.items():
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    missing = set(names) - set(signature)
    assert not missing, f"{kernel.fn.__name__}: no value for {missing}"
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=given)


@contextmanager
def compiling(done: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, kernels are compiled where they would be started."""

    def instead(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = compile_launch(kernel, *args, **starter.options_of(kernel, options))
        assert compiled.metadata.shared <= SHARED_LIMIT, f"{kernel.fn.__name__}: {compiled.metadata.shared} bytes"
        done(kernel.fn.__name__, compiled)

    kept, starter.launch = starter.launch, instead
    try:
        yield
    finally:
        starter.launch = kept


BF16, F32 = torch.bfloat16, torch.float32


def m(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor that has a shape only."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return m(*shape, dtype=torch.int64)


def packed(e: int, rows: int, columns: int, tiled: bool = True) -> Mxfp4Weight:
    own = m(e, rows, columns // 2, dtype=torch.uint8), m(e, rows, columns // 32, dtype=torch.uint8)
    return Mxfp4Weight(*own, tiled)


def glu(kind: str) -> Glu:
    return Glu("situ" if kind == "situ" else "silu", 4.0, 25.0, lambda t: t)


def small() -> None:
    norm.rms_norm(m(4, 7168), m(7168), 1e-5)
    norm.add_norm(m(4, 2304), m(4, 2304), m(2304), 1e-5)
    norm.gated_rms_norm(m(4, 6, 128, dtype=F32), m(4, 6, 128), m(128, dtype=F32), 1e-5)
    norm.l2_norm(m(4, 12, 128, dtype=F32), 1e-6)
    activation.situ_glu(m(4, 768), 4.0, 25.0)
    activation.silu_glu(m(4, 2048))
    activation.output_gate(m(6, 4, 128).transpose(0, 1), m(4, 768))
    residual.mix_norm(m(4, 9, 7168), m(4, 7168), residual.ADD, m(7168, dtype=F32), 1e-5, m(7168), 1e-5, mixed=False)
    residual.mix_norm(
        m(4096, 9, 7168), m(4096, 7168), residual.ADD, m(7168, dtype=F32), 1e-5, m(7168), 1e-5, mixed=False
    )
    residual.mix_norm(m(4, 9, 7168), m(4, 7168), residual.REPLACE, m(7168, dtype=F32), 1e-5, m(7168), 1e-5, mixed=True)
    residual.mix_norm(m(64, 9, 7168), m(64, 7168), residual.ADD, m(7168, dtype=F32), 1e-5, m(7168), 1e-5, mixed=False)
    triton_route.choose(m(4, 5248, dtype=F32), m(896, dtype=F32), (896, 3584, 768), glu("situ"), 16, 1.0, True)
    triton_route.choose(m(3, 4, 5248, dtype=F32), m(896, dtype=F32), (896, 3584, 768), glu("situ"), 16, 1.0, True)
    triton_route.choose(m(4, 2304, dtype=F32), m(256, dtype=F32), (256, 0, 2048), glu("silu"), 8, 2.4, True)
    triton_route.route(m(4, 896, dtype=F32), m(896, dtype=F32), 16, 1.0, True)


def products() -> None:
    for tokens in (1, 16, 64):
        for rows, width in ((3584, 7168), (5248, 7168), (576, 7168), (12608, 2304), (7168, 384)):
            tile = linear.tile_of(tokens, rows, width)
            if tile is None:
                continue
            linear.linear(m(tokens, width), m(rows, width), tile)
            linear.linear(m(tokens, width), m(rows, width), tile, F32)
            linear.linear(m(tokens, width), m(rows, width), tile, plus=m(tokens, rows))
        linear.linear_both(m(tokens, 3584), m(7168, 3584), m(tokens, 384), m(7168, 384), linear.FLAT)
    for rows, width in ((12608, 2304), (2304, 4096)):
        form = triton_one.form_of(rows, width)
        assert form is not None
        triton_one.linear(m(1, width), m(rows, width), form)
        triton_one.linear(m(1, width), m(rows, width), form, F32)
        triton_one.linear(m(1, width), m(rows, width), form, plus=m(1, rows))


def rings() -> None:
    for tokens in (1, 16, 17, 64):
        for rows, width in ((5248, 7168), (3264, 7168), (1728, 7168), (7168, 768), (7168, 384)):
            for find, apart in ((ring.ring_of, False), (ring.apart_of, True)):
                found = find(tokens, rows, width)
                if found is not None:
                    ring.product(m(tokens, width), m(rows, width), found, apart=apart)
        ring.product(m(tokens, 7168), m(5248, 7168), ring.Ring(2, 4, 2), F32)
        both = ring.ring_of(tokens, 7168, 3584, 192)
        assert both is not None
        ring.product(m(tokens, 3584), m(7168, 3584), both, second=(m(tokens, 192), m(7168, 192)))


def kda_step() -> None:
    p, wide = 6 * 128, {"dtype": F32}
    vectors = (m(4, 3 * p, **wide), m(6, **wide), m(p, **wide), m(128, **wide))
    for state, bound in ((F32, -5.0), (BF16, None)):
        arena = m(9, 3, 3 * p), m(9, 6, 128, 128, dtype=state), ints(4)
        kda.decode_step(m(4, 3 * p), m(4, p), m(4, p), m(4, 6), *vectors, *arena, bound, 1e-5)
        low = m(p, 128), None if bound else m(p, 128)
        gate = m(4, p if bound else 128)
        kda.decode_step(m(4, 3 * p), m(4, 128), gate, m(4, 6), *vectors, *arena, bound, 1e-5, *low)
        kda.decode_step(m(64, 3 * p), m(64, p), m(64, p), m(64, 6), *vectors, *arena[:2], ints(64), bound, 1e-5)
        for rows in (1, 32, 64):
            products = m(4, rows, 3264, dtype=F32).split((3 * p, p, 6, 26, 128, 32), dim=2)
            given = products[0], products[4], products[1], products[2]
            kda.decode_step(*given, *vectors, *arena[:2], ints(rows), bound, 1e-5, m(p, 128))


def kda_chunks() -> None:
    cases = (
        (3, 128, -5.0, 2),
        (3, 128, -5.0, 1),
        (32, 128, None, 2),
        (2, 64, None, 2),
        (3, 32, -5.0, 2),
        (2, 16, None, 2),
    )
    for heads, k, bound, sequences in cases:
        # One sequence is a long one, which is cut into segments.
        p, tokens, wide = heads * k, 8192 // sequences, {"dtype": F32}
        vectors = (m(4, 3 * p, **wide), m(heads, **wide), m(p, **wide), m(k, **wide))
        tiles = ChunkTiles(64, tokens // 64, ints(4, tokens // 64), ints(5, sequences))
        arena = m(9, 3, 3 * p), m(9, heads, k, k, **wide), tiles
        inputs = m(tokens, 3 * p), m(tokens, p), m(tokens, p), m(tokens, heads)
        kda_chunk.chunks(*inputs, *vectors, *arena, bound, 1e-5, m(tokens, p))


def mla_step() -> None:
    for rows in (BF16, torch.float8_e4m3fn):
        narrow = m(50, 64, 128, dtype=rows)
        mla.attend_latent(m(8, 4, 96), m(4, 8, 32), narrow, ints(4, 9), m(4, dtype=torch.int32), 0.1)
        mla_ends.write_rows(m(4, 128), m(96), 1e-6, narrow, ints(4), ints(4))
        cache, lengths = m(50, 64, 576, dtype=rows), m(4, dtype=torch.int32)
        mla.attend_latent(m(6, 4, 512), m(4, 6, 64), cache, ints(4, 9), lengths, 0.07)
        for heads in (6, 12, 32):
            mla.attend_latent(m(heads, 64, 512), m(64, heads, 64), cache, ints(64, 9), m(64, dtype=torch.int32), 0.07)
        mla_ends.write_rows(m(4, 576), m(512), 1e-6, cache, ints(4), ints(4))
    for heads, tokens in ((6, 1), (6, 64), (32, 16)):
        mla_ends.absorb(m(tokens, heads, 192), m(heads, 256, 512), 128)
        mla_ends.project(m(heads, tokens, 512), m(heads, 256, 512), 128, m(tokens, heads * 128))
    mla_ends.enter(m(4, 576), m(512), 1e-6, m(50, 64, 576), ints(4), ints(4), m(4, 1536), m(1536))
    q = m(32, 2, 512, dtype=F32), m(2, 32, 64, dtype=F32)
    mla.attend_latent(*q, m(50, 64, 576, dtype=F32), ints(2, 9), m(2, dtype=torch.int32), 0.07)


def experts_packed() -> None:
    for tokens in (1, 16, 64, 512, 4096):
        ids, weights = ints(tokens, 16), m(tokens, 16, dtype=F32)
        w13, w2 = packed(56, 6144, 3584), packed(56, 3584, 3072)
        moe.experts(m(tokens, 3584), ids, weights, w13, w2, glu("situ"), 56, 896)
    # A rank of 32: its experts in use are bits of one word.
    w13, w2 = packed(28, 6144, 3584), packed(28, 3584, 3072)
    moe.experts(m(64, 3584), ints(64, 16), m(64, 16, dtype=F32), w13, w2, glu("situ"), 28, 896)
    for tokens in (4, 512):
        w13, w2 = packed(8, 192, 160, False), packed(8, 160, 96, False)
        moe.experts(m(tokens, 160), ints(tokens, 2), m(tokens, 2, dtype=F32), w13, w2, glu("situ"))


def experts_plain() -> None:
    w13, w2 = m(256, 2048, 2304), m(256, 2304, 1024)
    for tokens in (1, 16, 1024, 8192):
        moe.experts(m(tokens, 2304), ints(tokens, 8), m(tokens, 8, dtype=F32), w13, w2, glu("silu"))
    moe.experts_plus(m(1, 2304), ints(1, 8), m(1, 8, dtype=F32), w13, w2, glu("silu"), (m(1, 1024), m(2304, 1024)))


def sampled() -> None:
    wide = {"dtype": torch.float64}
    sampling.least_kept(m(64, 163_840, dtype=F32), ints(64), m(64, **wide), m(64, **wide))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (small, products, rings, kda_step, kda_chunks, mla_step, experts_packed, experts_plain, sampled)
}
