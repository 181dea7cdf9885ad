"""What load? Sessions, arrivals, traces, the load client, the target, and one report for real and simulated runs."""
