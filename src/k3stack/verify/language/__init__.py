"""The small language that K3-nano speaks: a seeded generator of conversations, used to train and to verify it."""
