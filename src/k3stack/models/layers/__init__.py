"""The layers of the network: attention of two kinds, feed-forward of two kinds, two residual streams."""
