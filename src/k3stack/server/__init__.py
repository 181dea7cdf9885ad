"""How do clients talk to it? HTTP endpoints, streaming, metrics, health, keys, drain."""
