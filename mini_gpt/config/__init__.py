"""The config of a run: each field is defined once, with type, range and default. Imports runtime."""

from mini_gpt.config.loading import load
from mini_gpt.config.schema import Config

__all__ = ["Config", "load"]
