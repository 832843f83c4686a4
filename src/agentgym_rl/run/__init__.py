"""One training run, from a checked recipe to its summary."""
