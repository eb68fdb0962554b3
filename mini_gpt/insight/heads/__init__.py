"""Scores of each attention head for each kind of key, with a report and a figure."""
