"""How does a step run? Executors carry out plans: with the network, by a model of its cost, or by a script."""
