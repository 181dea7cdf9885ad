"""Device operations that accounting decides on and executors carry out, in plan order, between forward passes."""

from __future__ import annotations

import msgspec


class ClearState(msgspec.Struct, frozen=True, tag="clear_state", array_like=True):
    """Zero the state (recurrent and window, all layers) in ``block``: a fresh sequence begins there."""

    block: int


class CopyState(msgspec.Struct, frozen=True, tag="copy_state", array_like=True):
    """Copy a whole state from block ``src`` to block ``dst``: a snapshot taken, or restored."""

    src: int
    dst: int


class CopyPage(msgspec.Struct, frozen=True, tag="copy_page", array_like=True):
    """Copy cache rows 0..``rows``-1 of every MLA layer from page ``src`` to page ``dst``: a move, or the private
    copy of a shared page that ends inside the prefix."""

    src: int
    dst: int
    rows: int


class SetPage(msgspec.Struct, frozen=True, tag="set_page", array_like=True):
    """Entry ``index`` of row ``row``'s page table becomes ``page`` (after a move, or when two rows share a page)."""

    row: int
    index: int
    page: int


class SetState(msgspec.Struct, frozen=True, tag="set_state", array_like=True):
    """Row ``row``'s state now lies in ``block`` (after a move)."""

    row: int
    block: int


Op = ClearState | CopyState | CopyPage | SetPage | SetState
