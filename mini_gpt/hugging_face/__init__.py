"""Runs to and from the files of Hugging Face Transformers. Imports all rooms before it."""
