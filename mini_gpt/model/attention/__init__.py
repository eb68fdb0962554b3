"""Multi-head attention: the module, its inputs, and one file for each implementation."""
