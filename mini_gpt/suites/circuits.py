"""What heads do by their weights alone: their QK and OV circuits, and how heads read each other."""

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight import removed
from mini_gpt.insight.curves import token_labels
from mini_gpt.insight.mechanisms import circuits, head_roles
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

TOKENS = 128  # the most frequent ones, without --text
SAMPLE = 65_536  # tokens of the split in which they are counted
PAIRS = 4  # of tokens, for each circuit of a head


class Circuits(Suite):
    name = "circuits"
    flags = ("text",)
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        if found := circuits.unsupported(trained.model, circuits.NOT_IN_OV):
            field, value = found
            raise UserError(f"--suite={self.name} does not support model.{field}={value}; use --suite=patching")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens_T = _tokens(run, options)
        roles = head_roles.roles(run.model, tokens_T, PAIRS, removed.existing(run.trained.model))
        base.check_finite(run, (role.copying for role in roles))
        composition = circuits.composition(run.model, [(role.layer, role.head) for role in roles])
        return {
            "tokens": token_labels(tokens_T, run.tokenizer),
            "heads": [_with_texts(role, run.tokenizer) for role in roles],
            "composition": {name: base.listed(scores) for name, scores in composition.items()},
        }

    def rows(self, result: Result) -> list[Row]:
        """Return a row for each head, with the earlier head that it reads most by its queries, keys and values."""
        reads = {name: np.nan_to_num(np.array(scores, float)) for name, scores in result["composition"].items()}
        rows = []
        for head in result["heads"]:
            place = (head["layer"], head["head"])
            row = {"layer": place[0], "head": place[1], "copying": head["copying"]}
            row |= {"attends": _shown(head["attends"]), "writes": _shown(head["writes"])}
            for name, scores in reads.items():
                earlier = scores[:, :, *place]
                strongest = np.unravel_index(earlier.argmax(), earlier.shape)
                row[name] = f"{strongest[0]}.{strongest[1]} {earlier.max():.2f}" if earlier.max() > 0 else None
            rows.append(row)
        return rows

    def figure(self, result: Result) -> Figure:
        composition = {name: np.array(scores, float) for name, scores in result["composition"].items()}
        copying_NH = np.full(composition["key"].shape[:2], np.nan)
        for head in result["heads"]:
            copying_NH[head["layer"], head["head"]] = head["copying"]
        return head_roles.roles_figure(copying_NH, composition, title="circuits of the heads, by their weights")


def _tokens(run: Run, options: SuiteOptions) -> np.ndarray:
    """Return distinct tokens: those of --text, or the most frequent ones of the split, the most frequent first."""
    if options.text is not None:
        return np.array(list(dict.fromkeys(base.opening(run, options, run.config.context_length).tolist())))
    separator = tokenizers.separator(run.tokenizer)
    inputs = [batch["inputs"].ravel() for _, batch in base.batches(run, options.split, SAMPLE, "losses")]
    counts = np.bincount(np.concatenate(inputs), minlength=run.model.vocab_size)
    counts[[separator, run.tokenizer.first or separator]] = 0  # also fills rows
    order = np.argsort(-counts, kind="stable")[:TOKENS]
    return order[counts[order] > 0]


def _with_texts(role: head_roles.Role, tokenizer: Tokenizer) -> Row:
    """Return the fields of a role, with the texts of its pairs of tokens."""
    fields = role._asdict()
    for name in ("attends", "writes"):
        if fields[name] is not None:
            fields[name] = [token_labels(pair, tokenizer) for pair in fields[name]]
    return fields


def _shown(pairs: list[list[str]] | None) -> str | None:
    return None if pairs is None else "  ".join(f"{first}→{second}" for first, second in pairs)
