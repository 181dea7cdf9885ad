"""Products of activations with weights, and the layout that weights have in memory for them."""
