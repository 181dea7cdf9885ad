"""Is it still right? Scores on a generated language, and agreement with stored reference outputs."""
