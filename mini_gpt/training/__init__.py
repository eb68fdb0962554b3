"""A config in, a run directory out. Imports all rooms before it."""
