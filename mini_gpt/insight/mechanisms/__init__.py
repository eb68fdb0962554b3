"""How a model computes: the logit lens, activation patching, attribution and circuits."""
