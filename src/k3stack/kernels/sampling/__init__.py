"""Which tokens top-k, top-p and min-p keep."""
