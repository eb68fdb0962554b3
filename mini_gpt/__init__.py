"""A laboratory for small GPTs: multi-head attention and positional encoding, measured."""
