"""Drafters: small models that propose tokens which the target verifies. Sizes only; nothing here runs one."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class Drafter:
    """A dense grouped-query drafter beside the target (the shape of the public DSPARK checkpoint)."""

    algorithm: str
    name: str
    layers: int
    hidden: int
    mlp_width: int
    q_heads: int
    kv_heads: int
    head_dim: int
    features: int
    """Hidden vectors of the target that one context token brings."""
    vocab: int
    markov_rank: int
    block: int
    """Tokens drafted at a time."""
    verify_width: int
    """Tokens that the target verifies at a time (D)."""
    published: bool = True
    """False: its shape is not public and the DSPARK shape stands in."""

    def row_bytes(self, attn_tp: int, itemsize: int = 2) -> int:
        """Cache bytes of one token on one GPU: K and V of every layer, heads cut over attention TP."""
        heads = max(1, self.kv_heads // attn_tp)
        return self.layers * heads * 2 * self.head_dim * itemsize

    def weight_bytes(self, tp: int) -> int:
        """Bytes on one GPU (bf16): layers cut over ``tp``; context projection and Markov tables copied.

        Which parts are copied is an assumption: it puts 1.08 GiB on a GPU at TP8, and three published boots of 8
        B300 differ by 1.04 to 1.36 GiB with and without the drafter.
        """
        d = self.hidden
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * d * q + 2 * d * kv + 3 * d * self.mlp_width
        copied = self.features * d * d + 2 * self.vocab * self.markov_rank
        return 2 * (self.layers * layer // tp + copied)


_DSPARK = Drafter("DSPARK", "RadixArk/Kimi-K3-DSpark", 5, 7168, 14336, 64, 16, 64, 5, 163840, 256, 7, 8)
_DFLASH = Drafter("DFLASH", "modal-labs/Kimi-K3-DFlash", 5, 7168, 14336, 64, 16, 64, 5, 163840, 0, 8, 8, False)


def drafter(algorithm: str, *, block: int | None = None, path: str | None = None) -> Drafter:
    """The drafter that ``--speculative-algorithm`` names, at the given block size. Raises UserError by name."""
    known = {"DSPARK": _DSPARK, "DFLASH": _DFLASH}
    base = known.get(algorithm.upper())
    if base is None:
        raise UserError(
            f"--speculative-algorithm {algorithm}: there is no drafter of that kind for Kimi-K3; known: DSPARK, DFLASH",
            param="--speculative-algorithm",
        )
    size = base.block if block is None else block
    if not 1 <= size <= 16:
        raise UserError(f"a draft block of {size} tokens is not from 1 to 16", param="--speculative-dspark-block-size")
    # DSPARK verifies the anchor and every draft; DFLASH's block of n rows holds n - 1 drafts.
    width = size + 1 if base.algorithm == "DSPARK" else size
    return Drafter(
        base.algorithm, path or base.name, base.layers, base.hidden, base.mlp_width, base.q_heads, base.kv_heads,
        base.head_dim, base.features, base.vocab, base.markov_rank, size, width, base.published,
    )  # fmt: skip
