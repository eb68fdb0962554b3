"""A model and tokens in, losses and accuracies out. Imports runtime, config, data and model."""
