"""The model card: the README.md of an exported model."""

import re

from mini_gpt.data import splits
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.hugging_face.architecture import Architecture
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import printable
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run


def text(run: Run, architecture: Architecture) -> str:
    """Return the model card of a run that is exported as `architecture`."""
    config, model = run.config, run.config.model
    layers = f"{model.encoder_layers} + {model.num_layers}" if model.encoder_layers else str(model.num_layers)
    trained = config.train.batch_size * config.context_length * run.step
    facts = {
        "architecture": f"{architecture.title}, {layers} layers, width {model.d_model}, {model.num_heads} heads",
        "positions": model.position,
        "parameters": f"{model_parameters.count(run.model.parameters):,}",
        "context": f"{config.context_length:,} tokens",
        "tokenizer": f"{run.tokenizer.kind}, {len(run.tokenizer.token_bytes):,} ids",
    }
    origin = workdirs.described_origin(run.workdir)
    if origin is not None:
        facts["initial weights"] = origin
    if run.step:
        facts["corpus"] = config.data.corpus
        facts["trained"] = f"{run.step:,} steps, {trained:,} tokens, seed {config.seed}"
    prompt, alphabet = "The ", ""
    if isinstance(run.tokenizer, CharacterTokenizer):
        characters = run.tokenizer.characters
        alphabet = f" The vocabulary has {len(characters)} characters; any other character is an error."
        prompt = prompt if set(prompt) <= set(characters) else characters[0]
    if config.data.isolate_documents:
        facts["documents"] = "attention and positions of one document only; give texts of one document"
    if architecture.limits_length:
        facts["longer texts"] = f"from_pretrained with {architecture.context[0]} of their length, in tokens"
    rows = "\n".join(f"| {name} | {_table_cell(str(value))} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: {architecture.pipeline}
tags: [mini_gpt]
---

# A mini-GPT

| | |
|---|---|
{rows}
{_measured(run)}
```python
from transformers import {architecture.auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
model = {architecture.auto_class}.from_pretrained(DIRECTORY)
{_use(architecture, prompt, run)}
```

Written by mini_gpt.{alphabet}
"""


def _use(architecture: Architecture, prompt: str, run: Run) -> str:
    """Return the lines of code that use the model. The text that they generate fits into the context."""
    config = run.config
    options = f"max_new_tokens={min(64, config.context_length // 2)}, do_sample=True, top_k=40"
    if architecture.objective == "masked":
        return f"""text = tokenizer({prompt!r} + tokenizer.mask_token, return_tensors="pt")
print(tokenizer.decode(model(**text).logits[0, -1].argmax()))"""
    starts_with_separator = config.model.encoder_layers and run.tokenizer.start is None  # each source, as in training
    start = "tokenizer.eos_token + " if starts_with_separator else ""
    if config.train.objective == "span_corruption":
        start, prompt = "", f"{prompt}<extra_id_0>"
    return f"""prompt = tokenizer({start}{prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, {options})[0]))"""


def _table_cell(value: str) -> str:
    """Replace characters that could add a row, heading, link or HTML to the card."""
    return re.sub(r"[^\w\s.,:;/+-]", "?", printable(value).replace("\n", " "))


def _measured(run: Run) -> str:
    """Return the result of `eval.py` for this checkpoint, if there is one."""
    path = run.workdir / "eval" / "perplexity.json"
    try:
        found = files.read_with_checksum(path)
        if found["checkpoint_step"] != run.step or found["overrides"] or found["split"] not in splits.SPLITS:
            return ""
        split = f"{found['split']} split of {_table_cell(run.config.data.corpus)}"
        size = f"{found['tokens_scored']:,} tokens, in blocks of {found['context_length']:,}"
        result = f"{found['nll']:.4f} nats per token, {found['bits_per_byte']:.4f} bits per byte"
        return f"\nOn the {split} ({size}): {result}.\n"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
