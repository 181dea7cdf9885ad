"""Who owns which page? Arena, state blocks, cache pages, prefix tree. Accounting only: no tensors."""

from k3stack.memory.answers import NO_BLOCK, Extended, Lookup, MemoryStats, Opened
from k3stack.memory.memory import Memory

__all__ = ["NO_BLOCK", "Extended", "Lookup", "Memory", "MemoryStats", "Opened"]
