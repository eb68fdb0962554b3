"""Analyses and figures of a loaded model. Imports the core."""
