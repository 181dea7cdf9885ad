"""Who owns which page? Arena, state blocks, cache pages, prefix tree. Accounting only: no tensors."""
