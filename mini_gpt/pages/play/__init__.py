"""An HTML page in which a trained model runs, and can be edited."""
