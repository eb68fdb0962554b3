"""Losses and accuracies of a loaded model on texts and tasks. Imports runtime, config, data and model."""
