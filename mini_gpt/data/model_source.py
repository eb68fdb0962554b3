"""What the files of an imported model say about its use: token ids, generation, chat templates and license."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mini_gpt.runtime.errors import require

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LICENSE = ("license", "license_name", "license_link")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """The contents are kept for a later export as they are. Raises UserError, naming the field, if one is invalid.

    ids: the fields of IDS in config.json.
    generation: generation_config.json; None without one.
    chat_template: a Jinja template, a list of {"name": ..., "template": ...}, or None.
    license: the fields of LICENSE that its card has.
    """

    ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    generation: Mapping[str, Any] | None = None
    chat_template: Any = None
    license: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ids, generation = self.ids, {} if self.generation is None else self.generation
        require(isinstance(ids, dict) and {*ids} <= {*IDS}, "ids", ids, f"must be an object with {', '.join(IDS)}")
        require(isinstance(generation, dict), "generation_config.json", generation, "must be a JSON object")
        for where, values in (("config.json", ids), ("generation_config.json", generation)):
            valid = all(type(token) is int or token is None for token in _ends(values))
            remedy = "must be a whole number or a list of them"
            require(valid, f"{where}: eos_token_id", values.get("eos_token_id"), remedy)
        valid = isinstance(self.license, dict) and {*self.license} <= {*LICENSE} and _are_texts(self.license)
        require(valid, "license", self.license, f"must have texts named {', '.join(LICENSE)}")
        valid = all(isinstance(one, dict) and {*one} == {"name", "template"} and _are_texts(one) for one in self._named)
        right = "must be a text, or a list of objects with name and template"
        require(valid, "chat_template", self.chat_template, right)

    @property
    def ends(self) -> list[int]:
        """The ids of all tokens that end a text, those of config.json first."""
        found = dict.fromkeys(_ends(self.ids) + _ends(self.generation or {}))
        return [token for token in found if token is not None]

    @property
    def template(self) -> str | None:
        """The chat template; of several, that with the name default."""
        return next((one["template"] for one in self._named if one["name"] == "default"), None)

    @property
    def _named(self) -> list[dict[str, str]]:
        template = self.chat_template
        if isinstance(template, list):
            return template
        return [] if template is None else [{"name": "default", "template": template}]


def _ends(values: Mapping[str, Any]) -> list[Any]:
    found = values.get("eos_token_id")
    return found if isinstance(found, list) else [found]


def _are_texts(values: Mapping[str, object]) -> bool:
    return all(isinstance(text, str) for text in values.values())
