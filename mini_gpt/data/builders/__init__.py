"""TFDS builders for corpora that the TFDS catalogue lacks."""
