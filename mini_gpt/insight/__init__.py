"""Analyses and figures of a loaded model. Imports runtime, config, data, model and evaluation."""
