"""RMS normalisation, plain and gated, and the per-head L2 norm of KDA's queries and keys."""
