"""Attention Residuals: the mix of a token's bank rows and its running prefix."""
