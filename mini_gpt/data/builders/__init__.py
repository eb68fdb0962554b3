"""TFDS builders of our own, for corpora that the catalogue lacks."""
