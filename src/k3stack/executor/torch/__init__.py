"""Runs steps with torch: the device arena, the rows' tables, the sampler, and the executor that ties them together."""
