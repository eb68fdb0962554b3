"""An HTML page that shows a model's attention offline."""
