"""How does a step run? ``scripted`` (tests), ``modelled`` (durations from a cost function), ``torch`` (the network)."""
