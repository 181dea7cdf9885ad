"""The router and the routed experts."""
