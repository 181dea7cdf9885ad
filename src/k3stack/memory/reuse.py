"""What of a prompt can be reused, and why it is not more."""

from __future__ import annotations

from typing import NamedTuple

from k3stack.memory.tree import Ids, Node, PrefixTree, Snapshot


class Hit(NamedTuple):
    """What a prompt can reuse: pages up to ``node``, then the rows of ``tail``, which ``source`` has in its page."""

    node: Node
    tail: Ids
    source: Node | Snapshot | None
    snapshot: Snapshot | None
    position: int
    """Tokens that can be reused: at most all but the last, since one has to be computed to go on from."""
    pages_only: int
    """Tokens whose rows are here, snapshot or not."""
    forked: bool
    """Other prompts go on differently from where this one's pages end."""


def find(tree: PrefixTree, tokens: Ids, *, states: bool) -> Hit:
    """The longest reusable prefix of ``tokens``; ``states``: a snapshot is needed as well as pages."""
    width = tree.page_tokens
    match = tree.match(tokens, len(tokens) - 1)
    pages_only = match.node.depth * width + match.inside
    forked = bool(match.node.children) or match.inside > 0
    if states:
        best = match.snapshot
        if best is None:
            return Hit(tree.root, (), None, None, 0, pages_only, forked)
        return Hit(best.node, best.tail, best, best, best.position, max(pages_only, best.position), forked)
    position = min(match.node.depth * width, len(tokens) - 1)
    tail = tokens[position - position % width : position]
    if tail:
        return Hit(match.node.parent or tree.root, tail, match.node, None, position, pages_only, forked)
    return Hit(match.node, (), None, None, position, pages_only, forked)


def explain(prompt: int, hit: Hit, ghost: tuple[int, int] | None, page_tokens: int) -> str:
    """Why ``hit`` is not more, in words."""
    if hit.position and hit.position == prompt - 1:
        return f"all but the last of {prompt:,} tokens; one must be computed"
    parts = []
    if hit.position:
        parts.append(f"{hit.position:,} of {prompt:,} tokens: pages and a snapshot reach that far")
    elif not hit.pages_only:
        parts.append(f"nothing: no page of {page_tokens} tokens of this prompt is here")
    if hit.pages_only > hit.position:
        parts.append(f"pages without a snapshot reach {hit.pages_only:,}, so these tokens are computed again")
    if ghost is not None:
        parts.append(f"a snapshot near {ghost[0] * page_tokens:,} was here and has been evicted for want of room")
    return "; ".join(parts)
