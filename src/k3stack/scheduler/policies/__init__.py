"""Step policies, by the name that ``--policy`` takes."""
