"""Comparisons with other libraries, which are not installed with mini_gpt, and of two checkouts."""

import importlib.util
import sys

missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: found no {' and no '.join(missing)}; pip install -r requirements-hugging-face.txt")
