"""The arithmetic of the network, one folder an operation, each with a slow, readable ``reference`` twin.

Which implementation of an operation runs is decided once, when a model is built (``kernels.select``).
"""
