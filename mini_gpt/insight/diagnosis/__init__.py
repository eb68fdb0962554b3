"""Checks that find what is wrong with a trained model, if anything."""

from mini_gpt.insight.diagnosis.verdict import Finding, diagnose, most_likely

__all__ = ["Finding", "diagnose", "most_likely"]
