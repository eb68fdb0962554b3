"""Multi-head attention: the module, its masks, and one file for each implementation of the core."""
