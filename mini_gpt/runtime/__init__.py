"""Errors, files, start-up, progress, devices, processes and sharding. Imports no other package of mini_gpt."""
