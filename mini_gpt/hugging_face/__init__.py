"""Export runs to Hugging Face Transformers, and import its models. Imports all packages but commands."""
