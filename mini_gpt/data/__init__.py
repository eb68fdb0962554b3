"""Text in, batches out; knows no model."""
