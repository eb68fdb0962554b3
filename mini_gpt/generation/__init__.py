"""Generation of text from a model and a prompt. Imports runtime, config, data and model."""
