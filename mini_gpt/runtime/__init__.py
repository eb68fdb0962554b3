"""This machine and its processes: errors, files, devices, processes, sharding. Imports no other room."""
