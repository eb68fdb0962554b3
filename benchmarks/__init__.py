"""Comparisons with other libraries, which are not installed with mini_gpt, of two checkouts, and of ways to train."""
