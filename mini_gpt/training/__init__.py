"""Training: a config in, a run directory out. Imports the rest of the core."""
