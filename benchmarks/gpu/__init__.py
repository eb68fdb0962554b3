"""Checks and measurements on one NVIDIA GPU, each part in a process of its own, into one JSON file and one page."""
