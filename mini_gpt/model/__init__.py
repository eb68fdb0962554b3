"""The model, which computes logits from tokens. Imports runtime and config."""

from mini_gpt.model.gpt import MiniGPT

__all__ = ["MiniGPT"]
