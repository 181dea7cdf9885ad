"""Kimi Delta Attention: short convolution, decay gate, and the delta rule with per-channel decay."""
