"""Multi-head latent attention without positions, over cache rows ``[normed latent | raw shared key]``."""
