"""The model card: the README.md of an exported model."""

import json
import re
from pathlib import Path

from mini_gpt.data import splits
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.tokenizers import CharacterTokenizer, Tokenizer, WordTokenizer
from mini_gpt.hugging_face.architecture import Architecture
from mini_gpt.hugging_face.origin import described_origin, imported_from
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, printable
from mini_gpt.training import run_directory
from mini_gpt.training.run import Run

HUB_COPY = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)  # a directory of the Hub's cache
LANGUAGE = re.compile(r"[a-z]{2,3}")  # an ISO 639 code
MOST_RUNS = 100  # of which each started from the one before
UNKNOWN = "unknown"  # an identifier of the Hub


def text(run: Run, architecture: Architecture, dtype: str, context: int) -> str:
    """Return the model card of a run that is exported as `architecture`.

    dtype: of the weights.
    context: the length in the exported config.json, in tokens.
    """
    facts = _facts(run, architecture, dtype, context)
    rows = "\n".join(f"| {name} | {_table_cell(fact)} |" for name, fact in facts.items())
    prompt, vocabulary = _prompt(run.tokenizer)
    return f"""---
library_name: transformers
pipeline_tag: {architecture.pipeline}
{_metadata(run)}
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

{_about_license(run)}

Written by mini_gpt.{vocabulary}
"""


def _facts(run: Run, architecture: Architecture, dtype: str, context: int) -> dict[str, str]:
    """Return the rows of the card's table."""
    config, model = run.config, run.config.model
    layers = f"{model.encoder_layers} + {model.num_layers}" if model.encoder_layers else str(model.num_layers)
    facts = {
        "architecture": f"{architecture.title}, {layers} layers, width {model.d_model}, {model.num_heads} heads",
        "positions": str(model.position),
        "parameters": f"{model_parameters.count(run.model.parameters):,}",
        "context": f"{context:,} tokens",
        "tokenizer": f"{run.tokenizer.kind}, {len(run.tokenizer.token_bytes):,} ids",
    }
    origin = described_origin(run.workdir)
    if origin is not None:
        facts["initial weights"] = origin
    if run.step:
        batch = f"{config.train.batch_size:,} rows of {config.context_length:,} tokens"
        facts["corpus"] = config.data.corpus
        facts["trained"] = f"{run.step:,} steps of {batch}, seed {config.seed}"
    if dtype != "float32":
        facts["weights"] = f"rounded to {dtype}"
    if config.data.isolate_documents:
        facts["documents"] = "attention and positions of one document only; give texts of one document"
    if architecture.limits_length:
        facts["longer texts"] = f"from_pretrained with {architecture.context[0]} of their length, in tokens"
    return facts


def _prompt(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return a prompt that the tokenizer can encode, and a sentence about a vocabulary that lacks some texts."""
    prompt = "The "
    if isinstance(tokenizer, CharacterTokenizer):
        characters = tokenizer.characters
        if not set(prompt) <= set(characters):
            prompt = characters[0]
        return prompt, f" The vocabulary has {len(characters)} characters; any other character is an error."
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.words[0], f" The vocabulary has {len(tokenizer.words):,} words; any other word is an error."
    return prompt, ""


def _metadata(run: Run) -> str:
    """Return the lines of YAML that the Hub reads, apart from those that all cards have."""
    fields = {"license": UNKNOWN} | {**run.tokenizer.source.license}
    base = _base_model(run.workdir)
    if base is not None:
        fields["base_model"] = base
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    languages = [name for name in run.config.data.pair or () if LANGUAGE.fullmatch(name)]
    return "\n".join([*lines, *([f"language: {json.dumps(languages)}"] if languages and run.step else [])])


def _about_license(run: Run) -> str:
    source, check = run.tokenizer.source, "Check its terms before you use or publish this model."
    if "license" in source.license:
        return f"License: {_table_cell(source.license['license'])}, as the card of the source states. {check}"
    if source != ModelSource():
        return f"License: not found in the files of the source. {check}"
    return "License: not stated. Before you publish this model, choose one and write it at the start of this file."


def _base_model(workdir: Path) -> str | None:
    """Return the name on the Hub of the model of which the run is a copy or a further training; None if not known."""
    try:
        for _ in range(MOST_RUNS):
            if imported := imported_from(workdir):
                found = HUB_COPY.fullmatch(Path(imported["directory"]).parent.parent.name)
                return imported.get("model") or (f"{found[1]}/{found[2]}" if found else None)
            before = run_directory.initial_run(workdir)
            if before is None:
                return None
            workdir = Path(before.workdir)
    except (UserError, OSError):  # the earlier run is no longer there
        pass
    return None


def _use(architecture: Architecture, prompt: str, run: Run) -> str:
    """Return the lines of code that use the model. The text that they generate fits into the context."""
    config = run.config
    options = f"max_new_tokens={min(64, config.context_length // 2)}, do_sample=True, top_k=40"
    if architecture.objective == "masked":
        return f"""text = tokenizer({prompt!r} + tokenizer.mask_token, return_tensors="pt")
print(tokenizer.decode(model(**text).logits[0, -1].argmax()))"""
    starts_with_separator = config.model.has_encoder and run.tokenizer.start is None  # each source, as in training
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
