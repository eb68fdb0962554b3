"""Checks for faults of a trained model. `checks.diagnose` runs all of them."""
