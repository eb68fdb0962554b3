"""Models to and from the files that Hugging Face's Transformers reads: safetensors, never pickle."""
