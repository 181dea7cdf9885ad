"""The network: Kimi-K3 and Kimi-Linear, their layers, and reading their checkpoints."""
