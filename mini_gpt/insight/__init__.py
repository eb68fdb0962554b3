"""A loaded model and tokens in, findings and figures out. Imports runtime, config, data, model and evaluation."""
