"""Checks for faults of a trained model. `verdict.diagnose` runs all of them."""
