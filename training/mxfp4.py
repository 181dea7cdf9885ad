"""MXFP4 as Kimi-K3's files hold it: e2m1 codes, a power of two for 32 inputs. Fake in training, exact on export."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_of(weight: Tensor) -> Tensor:
    """Exponents [..., groups, 1] such that no value of a group exceeds 6 (the largest code)."""
    top = weight.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
    return torch.ceil(torch.log2(top / 6.0))


def round_code(scaled: Tensor) -> Tensor:
    """The nearest e2m1 value: steps of 0.5 below 2, of 1 below 4, of 2 up to 6."""
    size = scaled.abs()
    step = torch.where(size < 1.75, 0.5, torch.where(size < 3.5, 1.0, 2.0))
    return torch.sign(scaled) * (torch.round(size / step) * step).clamp(max=6.0)


def quantize(weight: Tensor) -> Tensor:
    """``weight`` rounded to what MXFP4 can hold, same shape, float32."""
    factor = torch.exp2(scale_of(weight))
    groups = weight.unflatten(-1, (-1, GROUP))
    return (round_code(groups / factor) * factor).flatten(-2)


def fake(weight: Tensor) -> Tensor:
    """Quantised forward, straight-through backward."""
    return weight + (quantize(weight) - weight).detach()


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed [..., out, in/2] uint8, low nibble first; scale [..., out, in/32] uint8) of ``quantize(weight)``."""
    exponent = scale_of(weight)
    code = round_code(weight.unflatten(-1, (-1, GROUP)) / torch.exp2(exponent)).flatten(-2)
    table = torch.tensor(VALUES)
    index = torch.searchsorted(table, code.abs().contiguous())
    nibble = (index + 8 * (code < 0)).to(torch.uint8)
    packed = nibble[..., 0::2] | (nibble[..., 1::2] << 4)
    return packed.contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous()


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """The values of ``pack``'s result, [..., out, in] float32."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)])
    values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), -1).flatten(-2)
    return (values.unflatten(-1, (-1, GROUP)) * torch.exp2(scale.float() - 127)[..., None]).flatten(-2)
