"""Weights written in oneDNN's layout without oneDNN: block by block, into memory that the caller has.

On x86 with AVX-512 the layout of a weight [out, in] is: the rows in blocks (of 64 for a product, of 48 or 32 for a
convolution; the last one filled up with zeros), and in a block, of words of 32 bits (a float32, or two neighbouring
bfloat16), the first of every row, the second of every row, and so on. So rows can be packed as they arrive, where they
are to stay, by copies of torch. On a Zen 4 core these do 12 GB/s, oneDNN's own reorder 1.5 to 6 (least where rows are
a power of two long: rows of the source then meet in the same lines of the cache, so it is given some words between).

Whether a weight lies like that is found out in advance from samples, byte by byte. torch has no operation that makes a
packed weight of memory that is there: it is done by the C interface that its compiled models use.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3stack.kernels.linear.cpu import (
    RESIDUES,
    SAMPLE,
    TRIED_ROWS,
    Packed,
    describe,
    packs,
    reorder_convolution,
    stays_plain,
    tall,
)

WORD = 4
BLOCKS = (64, 48, 32, 16)
"""Heights of a block that are tried."""
SAMPLES = (128, 200)
"""Heights whose descriptions tell those of taller weights: a multiple of any block, and not one."""
CHECKED = 840
"""A height at which that is tried."""
TALL_SAMPLES = (1920, 2008)
"""The same for weights that are laid out as of a convolution."""
PITCH = 64
"""Bytes between the rows of a source, see ``scratch``."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """How a weight [out, in] lies in memory."""

    shape: tuple[int, int]
    dtype: torch.dtype
    dims: tuple[int, ...]
    """As torch has it: [out, in], or [out, in, 1, 1] for a convolution."""
    rows: int
    """Of a block."""
    description: Tensor
    """As torch's operation serializes it."""

    @property
    def nbytes(self) -> int:
        return self._filled * self._row_bytes

    def write(self, plain: Tensor, memory: Tensor, start: int) -> None:
        """Pack rows from ``start`` on, both whole blocks, from ``scratch`` into the weight's ``memory`` (uint8)."""
        count, words = plain.shape[0] // self.rows, self._row_bytes // WORD
        part = memory[start * self._row_bytes : (start + plain.shape[0]) * self._row_bytes]
        blocks = plain.view(torch.int32).unflatten(0, (count, self.rows))
        part.view(torch.int32).view(count, words, self.rows).copy_(blocks.transpose(1, 2))

    def weight(self, memory: Tensor) -> Packed:
        """The weight whose blocks have all been written to ``memory``."""
        data = tensor_at(memory.data_ptr(), self.dims, self.dtype, self.description)
        filling = (self._filled - self.shape[0]) * self._row_bytes
        return Packed(data, self.shape, self.dtype, memory, filling)

    @property
    def _filled(self) -> int:
        return -(-self.shape[0] // self.rows) * self.rows

    @property
    def _row_bytes(self) -> int:
        return self.shape[1] * self.dtype.itemsize


def scratch(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], uninitialised, from which ``Blocked.write`` is fast."""
    return torch.empty(rows, width + PITCH // dtype.itemsize, dtype=dtype)[:, :width]


@cache
def blocked_linear(out: int, width: int, dtype: torch.dtype) -> Blocked | None:
    """Layout of a weight as ``cpu.pack`` makes it; None where it is another one or cannot be made."""
    if library() is None or not packs(dtype, torch.device("cpu")) or width * dtype.itemsize % WORD:
        return None

    convolution = tall(out, width, dtype)
    samples, sample = (TALL_SAMPLES, SAMPLE + out % RESIDUES) if convolution else (SAMPLES, CHECKED)
    dims = (out, width, 1, 1) if convolution else (out, width)

    def pack(plain: Tensor) -> Tensor:
        if convolution:
            return reorder_convolution(plain, 1, TRIED_ROWS[0])
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, None)
        return packed

    def known(height: int) -> tuple[Tensor, int] | None:
        plain = values(height, width, dtype)
        return describe(made := pack(plain)), rows if (rows := block_rows(plain, made)) else 0

    if out <= CHECKED:
        one = known(out)
        return None if one is None or not one[1] else Blocked((out, width), dtype, dims, one[1], one[0])
    low, high, checked = (known(n) for n in (*samples, sample))
    if not low or not high or not checked or not low[1] == high[1] == checked[1] > 0:
        return None
    if (at := height_words(low[0], high[0], low[1], samples)) is None:
        return None
    if not torch.equal(with_height(low[0], at, sample, low[1]), checked[0]):
        return None
    return Blocked((out, width), dtype, dims, low[1], with_height(low[0], at, out, low[1]))


def home(out: int, width: int, dtype: torch.dtype) -> tuple[Blocked, Tensor] | None:
    """``blocked_linear`` of a weight, and new memory (uint8) for it; None also for one that stays plain."""
    blocked = None if stays_plain(out, width, dtype) else blocked_linear(out, width, dtype)
    return None if blocked is None else (blocked, torch.empty(blocked.nbytes, dtype=torch.uint8))


def values(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] of numbers by which bytes in another order are told: neighbours differ in both directions."""
    line, column = torch.arange(rows, dtype=torch.int16), torch.arange(width, dtype=torch.int16)
    # Whole numbers below 256 are exact in bfloat16.
    return (line.mul_(37).remainder_(239).unsqueeze(1) + column.mul_(101).remainder_(13)).to(dtype)


def block_rows(plain: Tensor, packed: Tensor) -> int | None:
    """The height of a block, where ``packed`` is ``plain`` laid out as described above."""
    (out, width), size = plain.shape, torch.ops.mkldnn._nbytes(packed)
    if width * plain.itemsize % WORD:
        return None
    for rows in BLOCKS:
        filled = -(-out // rows) * rows
        if filled * width * plain.itemsize != size:
            continue
        source = torch.zeros(filled, width, dtype=plain.dtype)
        source[:out] = plain
        own = source.view(torch.int32).view(filled // rows, rows, -1).transpose(1, 2).contiguous()
        if ctypes.string_at(own.data_ptr(), size) == ctypes.string_at(torch.ops.mkldnn.data_ptr(packed), size):
            return rows
    return None


def height_words(low: Tensor, high: Tensor, rows: int, samples: tuple[int, int]) -> tuple[int, int] | None:
    """Where descriptions of weights that are ``samples`` high have the height and the filled height; None where they
    differ in more."""
    a, b = _words(low), _words(high)
    differing = torch.nonzero(a != b).flatten().tolist()
    if len(differing) != 2 or a.numel() != b.numel():
        return None
    filled = [-(-n // rows) * rows for n in samples]
    found = [[int(w[i]) for w in (a, b)] for i in differing]
    return (differing[0], differing[1]) if found == [list(samples), filled] else None


def with_height(description: Tensor, at: tuple[int, int], out: int, rows: int) -> Tensor:
    """The description for another height."""
    other = description.clone()
    words = _words(other)
    words[at[0]], words[at[1]] = out, -(-out // rows) * rows
    return other


def at_count(low: Tensor, high: Tensor, few: int, count: int) -> Tensor | None:
    """The description of ``count`` groups from those of ``few`` and of one more; None where they differ in more than
    their number."""
    if low.numel() != high.numel():
        return None
    other = low.clone()
    a, b, words = _words(low), _words(high), _words(other)
    differing = a != b
    if not bool((a[differing] == few).all()) or not bool((b[differing] == few + 1).all()):
        return None
    words[differing] = count
    return other


def _words(description: Tensor) -> Tensor:
    """In 32 bits (numbers in it have 64, and are not aligned to them)."""
    return description[: description.numel() // WORD * WORD].view(torch.int32)


@cache
def library() -> Any:
    """torch's C interface for tensors at an address; None where this build does not have all that is needed."""
    needed = ("_convolution_pointwise", "_reorder_convolution_weight", "_get_mkldnn_serialized_md", "_nbytes")
    if not all(hasattr(torch.ops.mkldnn, name) for name in (*needed, "data_ptr")):
        return None
    file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not file.exists() or not hasattr(getattr(torch._C, "_aoti", None), "alloc_tensor_by_stealing_from_void_ptr"):
        return None
    found = ctypes.CDLL(str(file))
    names = ("create_tensor_from_blob_v2", "layout__mkldnn", "device_type_cpu", "dtype_float32", "dtype_bfloat16")
    return found if all(hasattr(found, f"aoti_torch_{name}") for name in names) else None


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, layout: Tensor) -> Tensor:
    """A packed tensor over memory that the caller keeps. ``layout`` is serialized as torch's operation gives it."""
    torchs = library()
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    sizes = ctypes.c_int64 * len(shape)
    handle = ctypes.c_void_p()
    failed = torchs.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        sizes(*shape),
        sizes(*strides),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(torchs, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()),
        ctypes.c_int32(torchs.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(torchs.aoti_torch_layout__mkldnn()),
        ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.numel()),
    )
    if failed:
        raise RuntimeError(f"torch made no tensor of {shape} in {dtype} at a given address (status {failed})")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return made
