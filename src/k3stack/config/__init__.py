"""What did I ask for? Frozen specs of model, hardware, layout, engine, workload and target."""
