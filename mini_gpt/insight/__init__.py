"""A model and tokens in, findings and figures out. Imports the rooms up to evaluation."""
