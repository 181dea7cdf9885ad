"""MXFP4: e2m1 codes, two a byte, with one power-of-two scale per 32 columns."""
