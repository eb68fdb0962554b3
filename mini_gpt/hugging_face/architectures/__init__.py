"""One file for each Transformers architecture, and the tables that they share."""
