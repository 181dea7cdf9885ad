"""Gated activations of the MLPs and experts: SiTU (Kimi-K3) and SiLU (Kimi-Linear)."""
