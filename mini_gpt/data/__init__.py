"""Text in, batches of tokens out. Imports runtime and config."""
