"""The arithmetic of the network, one folder an operation, each with a slow, readable ``reference`` twin.

Which implementation of an operation runs is decided once, when a model is built (``kernels.select``).
"""

from k3stack.kernels.memory import ask_for_huge_pages

ask_for_huge_pages()  # here, because it must come before torch's first allocation
