"""Optimizer, state, step, checkpoints, reporting, and the loop that joins them."""
