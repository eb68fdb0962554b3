"""End with one line that names the remedy, if PyTorch or Transformers is missing. Import it before them."""

import importlib.util
import sys

missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: found no {' and no '.join(missing)}; pip install -r requirements-hugging-face.txt")
