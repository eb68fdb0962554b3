"""Checks that find what is wrong with a trained model, if anything. `verdict.diagnose` runs all of them."""
