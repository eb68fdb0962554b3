"""Tests that need PyTorch, Transformers and gguf: `make test-hugging-face`. Without PyTorch, none is collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
