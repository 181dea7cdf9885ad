"""How many bytes, how many seconds? The only code that knows sizes; boot, plan and simulation all ask it."""
