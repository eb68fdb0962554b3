"""Compare a run with a model of Transformers, or with another run: tokens, loss, logits, and each layer."""

from pathlib import Path

import numpy as np

from mini_gpt.hugging_face import readers
from mini_gpt.hugging_face.readers import MOST, Reader, Reading
from mini_gpt.runtime.errors import require
from mini_gpt.training import run_directory

TINY = np.finfo(np.float32).tiny


def compare(left: Path, right: Path, text: str, tolerance: float) -> tuple[str, bool]:
    """Return a report, and whether tokens are equal, and layers and logits are within a tolerance.

    left: a run.
    right: a model's directory, which Transformers opens, or another run.
    text: its first MOST tokens are compared, or fewer if a context is shorter.
    tolerance: of the relative difference max|left − right| / max|right| at each place.

    Both models compute in float32 on the tokens of the left. Tokens and logits are matched by the names of the tokens.
    Of a model without a prediction head, layers are compared only. Raises UserError for a text of one token or with a
    token that the right lacks, if neither layers nor logits can be compared, and the errors of `readers`.
    """
    is_run = (right / run_directory.CORPUS).exists()
    ours = readers.of_run(left)
    theirs = readers.of_run(right) if is_run else readers.of_transformers(right, has_head=ours.has_head)
    ids_L, same_tokens, said = _tokens(ours, theirs, text)
    by_name = {name: token for token, name in enumerate(theirs.names)}
    to_right = np.array([by_name.get(name, -1) for name in ours.names])
    for token in ids_L.tolist():
        lacks = "the right lacks this token; give another text"
        require(to_right[token] >= 0, "--prompt", ours.show(token), lacks)
    both = ours.read(ids_L), theirs.read(to_right[ids_L])
    lines = [f"left   {ours.title}", f"right  {theirs.title}", "", said]
    rows = _layers(*both)
    not_compared = [] if rows else [_not_layer_by_layer(*both)]
    if ours.has_head and theirs.has_head:
        shared_V = np.flatnonzero(to_right >= 0)
        logits = both[0].logits_LV[:, shared_V], both[1].logits_LV[:, to_right[shared_V]]
        targets = ids_L if ours.masked else ids_L[1:]
        losses = [_nll(each.logits_LV, ids) for each, ids in zip(both, (targets, to_right[targets]), strict=True)]
        of = "of the tokens themselves: none is masked" if ours.masked else "per token"
        lines.append(f"loss: left {losses[0]:.6f}, right {losses[1]:.6f} nats {of}")
        if len(shared_V) < max(len(ours.names), len(theirs.names)):
            sizes = f"left {len(ours.names):,}, right {len(theirs.names):,}"
            lines.append(f"vocabulary: {sizes} tokens; logits are those of the {len(shared_V):,} that both have")
        lines.append(_largest(ours, ids_L, shared_V, *logits))
        rows = [*rows, ("logits", *logits)]
    else:
        not_compared.append("loss and logits: not compared, a model has no prediction head")
    require(bool(rows), "--right", right, f"nothing can be compared ({'; '.join(not_compared)})")
    lines += [*not_compared, "", "largest relative difference, and where"]
    first, width = None, max(len(name) for name, *_ in rows)
    for name, *pair in rows:
        relative, place = _difference(*pair)
        is_first = first is None and not relative <= tolerance  # also for NaN
        first, mark = (name, "  <- the first above the tolerance") if is_first else (first, "")
        lines.append(f"  {name:<{width}}  {relative:.1e}  at place {place}, {ours.show(int(ids_L[place]))!r}{mark}")
    within = f"within the relative tolerance of {tolerance:g}"
    verdict = f"Equal {within}." if first is None else f"Different from here on: {first}."
    if not same_tokens:
        verdict = f"Different tokens. On those of the left: {verdict[0].lower()}{verdict[1:]}"
    return "\n".join([*lines, "", verdict]), first is None and same_tokens


def _tokens(ours: Reader, theirs: Reader, text: str) -> tuple[np.ndarray, bool, str]:
    """Return the left's ids_L of the text, whether both tokenizers give the same tokens, and a line that says it."""
    most, encoded = min(MOST, ours.context, theirs.context), [_encoded(reader, text) for reader in (ours, theirs)]
    pairs = [(reader, ids[:most].tolist()) for reader, ids in zip((ours, theirs), encoded, strict=True)]
    for reader, ids in pairs:
        largest, lacks = max(ids, default=0), "the model has no row for this id of its tokenizer; give another text"
        require(largest < len(reader.names), f"{reader.title}: token id", largest, lacks)
    left, right = ([reader.names[token] for token in ids] for reader, ids in pairs)
    require(len(left) > 1, "--prompt", text, "must have at least two tokens")
    count = f"the first {most:,} of {len(encoded[0]):,}" if len(encoded[0]) > most else f"{len(left):,}"
    if left == right:
        return encoded[0][:most], True, f"tokens: {count}, equal"
    place = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    found = [repr(reader.show(ids[place])) if place < len(ids) else "the end" for reader, ids in pairs]
    said = f"tokens: {count}, different from place {place} on: left {found[0]}, right {found[1]}"
    return encoded[0][:most], False, f"{said}; both models read those of the left"


def _encoded(reader: Reader, text: str) -> np.ndarray:
    """Return the ids of a text without a token that ends each text: mini_gpt leaves it out if it is the separator."""
    ids, around = reader.encode(text).astype(np.int64), reader.encode("")
    return ids[:-1] if len(ids) and len(around) and ids[-1] == around[-1] else ids


def _nll(logits_LV: np.ndarray, targets_L: np.ndarray) -> float:
    """Return the mean loss of the targets, in nats, computed in float64."""
    logits_LV = logits_LV[: len(targets_L)].astype(np.float64)
    chosen_L1 = np.take_along_axis(logits_LV, targets_L[:, None], axis=-1)
    return float(np.logaddexp.reduce(logits_LV - chosen_L1, axis=-1).mean())


def _layers(left: Reading, right: Reading) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (name, left x_LD, right x_LD) of the streams; nothing if their numbers or widths differ."""
    if left.streams_PLD.shape != right.streams_PLD.shape:
        return []
    names = ["embeddings", *(f"after layer {layer}" for layer in range(len(left.streams_PLD) - 1))]
    names[-1] += ", normed"
    return list(zip(names, left.streams_PLD, right.streams_PLD, strict=True))


def _not_layer_by_layer(*both: Reading) -> str:
    sizes = [f"{len(each.streams_PLD) - 1} of width {each.streams_PLD.shape[-1]}" for each in both]
    return f"layers: not compared, left {sizes[0]}, right {sizes[1]}"


def _largest(reader: Reader, ids_L: np.ndarray, shared_V: np.ndarray, left_LV: np.ndarray, right_LV: np.ndarray) -> str:
    """Return a line on the largest difference of two logits. shared_V: the reader's ids of their tokens."""
    gap_LV = np.abs(left_LV - right_LV)
    place, column = np.unravel_index(np.argmax(gap_LV), gap_LV.shape)
    read, token = reader.show(int(ids_L[place])), reader.show(int(shared_V[column]))
    pair = f"left {left_LV[place, column]:.6g}, right {right_LV[place, column]:.6g}"
    return f"logits: largest difference {gap_LV.max():.2g} ({pair}), at place {place} after {read!r}, for {token!r}"


def _difference(left_LN: np.ndarray, right_LN: np.ndarray) -> tuple[float, int]:
    """Return the largest max|left − right| / max|right| of a place, and the place. NaN counts as the largest."""
    gap_L = np.abs(left_LN - right_LN).max(axis=-1) / np.maximum(np.abs(right_LN).max(axis=-1), TINY)
    place = int(np.argmax(gap_L))
    return float(gap_L[place]), place
