"""Read and write what a model's files say about its use: generation_config.json, chat templates, license."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_gpt.data.model_source import IDS, ModelSource
from mini_gpt.hugging_face.settings import find_file
from mini_gpt.runtime.errors import UserError

NAMES = GENERATION, TEMPLATE, CARD = "generation_config.json", "chat_template.jinja", "README.md"
LONGEST_HEADER = 2**16  # bytes of the card in which its fields are looked for
FIELD = re.compile(r"(license|license_name|license_link): *([\"']?)([\w.:/+ -]+)\2 *", re.ASCII)


def read(directory: Path, config: Mapping[str, Any], of_tokenizer: Mapping[str, Any]) -> ModelSource:
    """Return what the files of a directory say. Raises UserError if one is too large or not valid.

    config: the values of config.json.
    of_tokenizer: those of tokenizer_config.json, in which older versions of Transformers write the chat template.
    """
    ids = {name: config[name] for name in IDS if name in config}
    generation, template = _read(directory, GENERATION), _read(directory, TEMPLATE)
    try:
        described = None if generation is None else json.loads(generation)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{directory / GENERATION}: not valid JSON ({error})") from None
    try:
        template = of_tokenizer.get("chat_template") if template is None else template
        return ModelSource(ids, described, template, _license(directory))
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None


def write(source: ModelSource, directory: Path, ids: Mapping[str, Any]) -> None:
    """Write generation_config.json as it was, or with the ids of config.json, and the chat template if there is one."""
    settings = {name: value for name, value in ids.items() if value is not None}
    described = settings if source.generation is None else source.generation
    content = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    (directory / GENERATION).write_text(content, encoding="utf-8")
    if isinstance(source.chat_template, str):
        (directory / TEMPLATE).write_bytes(source.chat_template.encode())


def _license(directory: Path) -> dict[str, str]:
    """Return the fields of LICENSE in the YAML before a model card. Values that are not plain text are left out."""
    try:
        with find_file(directory, CARD).open("rb") as file:
            lines = file.read(LONGEST_HEADER).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    if not lines or lines[0].strip() != "---":
        return {}
    header = itertools.takewhile(lambda line: line.strip() != "---", lines[1:])
    return {match[1]: match[3].strip() for line in header if (match := FIELD.fullmatch(line))}


def _read(directory: Path, name: str) -> str | None:
    """Return the text of a file; None if it is missing."""
    path = find_file(directory, name)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
