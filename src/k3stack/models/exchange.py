"""What ranks give each other in token-sharded prefill, where each keeps the residual stream of its share of tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """One rank's view. A step's T tokens are cut into equal shares of S, in order of the ranks."""

    share: slice
    """The tokens whose stream this rank keeps."""

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """All ranks' ``parts`` [S, n], in order of the tokens: [T, n] each. One all-gather for all of them."""
        ...

    def scatter(self, *partials: Tensor) -> tuple[Tensor, ...]:
        """Sums over the ranks of ``partials`` [T, n], of this rank's share: [S, n] each. One reduce-scatter."""
        ...
