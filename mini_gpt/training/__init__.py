"""Training: a config in, a run directory out. Imports the packages from runtime to insight."""
