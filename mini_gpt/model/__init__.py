"""The model, which computes logits from tokens. Imports runtime, config and data."""

from mini_gpt.model.gpt import MiniGPT

__all__ = ["MiniGPT"]
