"""The ways in which sample.py generates text, a file each."""
