"""A model and a prompt in, text out. Imports runtime, config, data and model."""
