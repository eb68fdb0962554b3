"""A model and tokens in, numbers out; knows no run directory."""
