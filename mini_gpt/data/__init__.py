"""Corpora, tokenizers and tasks, and batches of their tokens. Imports runtime and config."""
