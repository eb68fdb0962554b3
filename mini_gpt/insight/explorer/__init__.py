"""An HTML page of a model's attention that needs no network."""
