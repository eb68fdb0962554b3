"""Errors, files, progress, devices, processes and sharding. Imports no other package of mini_gpt."""
