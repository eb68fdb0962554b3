"""Tokens in, logits out; knows no data and no training."""

from mini_gpt.model.gpt import MiniGPT

__all__ = ["MiniGPT"]
