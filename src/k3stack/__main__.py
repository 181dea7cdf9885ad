"""`python -m k3stack` is `k3`."""

from __future__ import annotations

import sys

from k3stack.cli import main

sys.exit(main())
