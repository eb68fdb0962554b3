"""Corpora, tokenizers and tasks; batches of tokens made from them. Imports runtime and config."""
