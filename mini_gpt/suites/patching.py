"""Which activations carry the difference between two texts: activation patching."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import spans
from mini_gpt.insight import removed, uncertainty
from mini_gpt.insight.curves import token_label
from mini_gpt.insight.mechanisms import attribution, patching
from mini_gpt.insight.mechanisms.patching import Effects, TextPair
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

PRINTED = 5  # patches of each site with the largest effects


class Patching(Suite):
    name = "patching"
    flags = ("text", "other", "pairs")
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        given = [getattr(options, flag) is not None for flag in self.flags]
        if given not in ([True, True, False], [False, False, True]):
            needed = "needs two texts: --text=TEXT --other=TEXT; each ends with its answer"
            raise UserError(f"--suite={self.name} {needed}; or --pairs=FILE with both and a tab between in each line")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        pairs = [_pair(run, *fields) for fields in _texts(options)]
        with progress.shown("activation patching", patching.cost(run.model, pairs)):
            found = patching.patch_each(run.model, pairs)
        estimated = patching.estimate_each(run.model, pairs)
        scores = [score for effects in (*found, *estimated) for score in (*effects[:2], *effects.heads_NH.flat)]
        base.check_finite(run, scores)
        gone_NH = removed.mask(run.trained.model, run.trained.model.head_numbers) == 0
        for effects_NX in [array for effects in (*found, *estimated) for array in effects[3:] if array is not None]:
            effects_NX[gone_NH] = np.nan
        means, halves = _means(found, uncertainty.mean), _means(found, uncertainty.half_interval)
        direct = None
        if attribution.is_sum(run.config.model):
            shares = [attribution.attribute(run.model, pair.clean_L, *_answers(pair)) for pair in pairs]
            direct = jax.tree.map(lambda *share: np.mean(share, axis=0), *shares)
            direct = direct._replace(heads_NH=np.where(gone_NH, np.nan, direct.heads_NH))
        return {
            "pairs": [_described(run, *each) for each in zip(pairs, found, strict=True)],
            **means,
            "half_intervals": halves if len(pairs) > 1 else None,
            "estimates": _means(estimated, uncertainty.mean),
            "estimate_errors": _errors(found, estimated),
            "direct": direct and {name: base.listed(share) for name, share in direct._asdict().items()},
        }

    def rows(self, result: Result) -> list[Row]:
        """Return a row for each patch; with several pairs, `effect` is the mean, and low to high its 95% interval.

        estimate: of the effect, by attribution patching.
        """
        labels, halves = _labels(result), result["half_intervals"]
        half_of, rows, estimates = halves and _by_site(halves), [], _by_site(result["estimates"])
        for (site, axes), effects in _by_site(result).items():
            for index, effect in np.ndenumerate(effects):
                at = dict(zip(axes, index, strict=True))
                row = {"site": site, "layer": at["layer"], "head": at.get("head"), "place": at.get("place")}
                row |= {"token": None if row["place"] is None else labels[row["place"]], "effect": float(effect)}
                if half_of:
                    half = float(half_of[site, axes][index])
                    row |= {"low": row["effect"] - half, "high": row["effect"] + half} if half >= 0 else _NO_INTERVAL
                row |= {"estimate": float(estimates[site, axes][index])}
                rows += [] if np.isnan(effect) else [row]  # NaN: a removed head
        return rows

    def figure(self, result: Result) -> Figure:
        found = {site: np.array(effects_NL, float) for site, effects_NL in result["by_place"].items()}
        heads_NHL = None if result["heads_by_place"] is None else np.array(result["heads_by_place"], float)
        effects = Effects(0, 0, found, np.array(result["heads"], float), heads_NHL)
        direct = result["direct"]
        direct_NX = direct and np.column_stack([direct["heads_NH"], direct["feed_forward_N"]]).astype(float)
        title = f"activations of {len(result['pairs'])} texts, put into the passes on others: means"
        if result["request"]["pairs"] is None:
            clean, corrupted = (base.quoted(result["request"][name]) for name in ("text", "other"))
            title = f"activations of {clean}, put into the pass on {corrupted}"
        return patching.patching_figure(effects, direct_NX, _labels(result), title=title)

    def printed(self, result: Result) -> str:
        """Return the scores of both texts, and for each site the patches with the largest effects.

        Of the residual stream, each place has one row: an effect stays in a place for many layers.
        """
        groups: dict[tuple[str, bool], dict[Any, Row]] = {}
        for row in sorted(self.rows(result), key=lambda row: -abs(row["effect"])):
            which = row["place"] if row["site"] == "stream" else (row["layer"], row["head"], row["place"])
            groups.setdefault((row["site"], row["place"] is None), {}).setdefault(which, row)
        order = [("stream", False), ("attention", False), ("feed_forward", False), ("head", True), ("head", False)]
        largest = [row for site in order for row in list(groups.get(site, {}).values())[:PRINTED]]
        pairs = result["pairs"]
        both = [f"{name}: {np.mean([pair[name]['score'] for pair in pairs]):.3f}" for name in ("clean", "corrupted")]
        score = " or ".join(dict.fromkeys(pair["score"] for pair in pairs))
        head = f"{score} of the answers, in nats: {', '.join(both)}"
        head += f" (means over {len(pairs)} pairs; low to high: 95% intervals)" if len(pairs) > 1 else ""
        errors = results.table(result["estimate_errors"])
        return f"{head}\n\n{results.table(largest)}\n\nestimates by attribution patching:\n\n{errors}"


_NO_INTERVAL = {"low": None, "high": None}  # fewer than two pairs were measured


def _texts(options: SuiteOptions) -> list[tuple[str, str, str, str]]:
    """Return (name, text) of both texts of each pair."""
    if options.pairs is None:
        assert options.text is not None and options.other is not None
        return [("--text", options.text, "--other", options.other)]
    try:
        lines = Path(options.pairs).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeError as error:
        raise UserError(f"--pairs={options.pairs}: {error}; give a UTF-8 file") from None
    found = []
    for number, line in enumerate(lines, 1):
        name = f"{options.pairs}, line {number}"
        require(line.count("\t") == 1, name, line, "must be a text, a tab and the other text")
        text, other = line.split("\t")
        found.append((name, text, name, other))
    return found


def _pair(run: Run, name: str, text: str, other_name: str, other: str) -> TextPair:
    clean, corrupted = _tokens(run, name, text), _tokens(run, other_name, other)
    if len(clean) != len(corrupted):
        raise UserError(
            f"{other_name}: found {len(corrupted)} tokens; must have as many as the first text, {len(clean)}"
        )
    differs = bool((clean[:-1] != corrupted[:-1]).any())
    require(differs, other_name, other, "must differ from the first text before its last token")
    return TextPair(clean[:-1], corrupted[:-1], int(clean[-1]), int(corrupted[-1]))


def _tokens(run: Run, name: str, text: str) -> np.ndarray:
    tokens = run.tokenizer.encode(text).astype(np.int32)
    require(len(tokens) > 1, name, text, "needs at least two tokens: the last one is the answer")
    run.config.model.check_length(len(tokens) - 1)
    return tokens


def _answers(pair: TextPair) -> tuple[int, int | None]:
    return pair.clean_answer, None if pair.clean_answer == pair.corrupted_answer else pair.corrupted_answer


def _described(run: Run, pair: TextPair, effects: Effects) -> Result:
    texts = ((pair.clean_L, pair.clean_answer, effects.clean), (pair.corrupted_L, *pair[3:], effects.corrupted))
    clean, corrupted = (
        {"tokens": spans.decode_each(np.append(tokens_L, answer), run.tokenizer), "score": score}
        for tokens_L, answer, score in texts
    )
    score = "log-probability" if _answers(pair)[1] is None else "logit difference"
    return {"clean": clean, "corrupted": corrupted, "score": score}


def _means(found: list[Effects], mean: Any) -> Result:
    """Return the fields of a result that have a number for each patch. mean: of an array over its first axis."""
    by_place = {site: base.listed(mean([each.by_place[site] for each in found])) for site in found[0].by_place}
    heads = base.listed(mean([each.heads_NH for each in found]))
    single = None if found[0].heads_NHL is None else base.listed(mean([each.heads_NHL for each in found]))
    return {"by_place": by_place, "heads": heads, "heads_by_place": single}


def _errors(found: list[Effects], estimated: list[Effects]) -> list[Row]:
    """Return a row for each kind of patch: how the estimates differ from the effects, over all pairs.

    correlation: Pearson's; None if one of them is constant.
    largest_error: the largest |estimate - effect|.
    """
    rows, estimates_of = [], _by_site(_means(estimated, np.array))
    for (site, axes), effects in _by_site(_means(found, np.array)).items():
        both_2P = np.stack([effects.ravel(), estimates_of[site, axes].ravel()])
        both_2P = both_2P[:, ~np.isnan(both_2P[0])]
        varies = bool((np.ptp(both_2P, axis=1) > 0).all())
        row = {"site": site, "by": ", ".join(axes), "patches": both_2P.shape[1]}
        row |= {"correlation": float(np.corrcoef(both_2P)[0, 1]) if varies else None}
        rows.append(row | {"largest_error": float(np.abs(both_2P[1] - both_2P[0]).max())})
    return rows


def _by_site(found: Mapping[str, Any]) -> dict[tuple[str, tuple[str, ...]], np.ndarray]:
    """Return {(site, names of its axes): effects} of a result."""
    named: dict[tuple[str, tuple[str, ...]], Any]
    named = {(site, ("layer", "place")): effects for site, effects in found["by_place"].items()}
    named |= {("head", ("layer", "head")): found["heads"]}
    if found["heads_by_place"] is not None:
        named |= {("head", ("layer", "head", "place")): found["heads_by_place"]}
    return {which: np.array(effects, float) for which, effects in named.items()}


def _labels(result: Result) -> list[str]:
    """Return a label for each place: its token, both tokens if two texts differ there, or the first and an ellipsis."""
    if not result["by_place"]:
        return []
    texts = [map(token_label, pair[name]["tokens"][:-1]) for pair in result["pairs"] for name in ("clean", "corrupted")]
    places = [list(dict.fromkeys(tokens)) for tokens in zip(*texts, strict=True)]
    return ["/".join(tokens if len(tokens) <= 2 else [tokens[0], "…"]) for tokens in places]
