"""The models of these tests are tiny: more than one thread only costs."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
