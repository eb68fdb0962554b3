"""Which activations carry the difference between two texts: activation patching."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import spans
from mini_gpt.insight import budget, removed
from mini_gpt.insight.curves import token_label
from mini_gpt.insight.mechanisms import attribution, patching
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run

PRINTED = 12  # patches with the largest effects


class Patching(Suite):
    name = "patching"
    flags = ("text", "other")
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        if options.text is None or options.other is None:
            raise UserError(f"--suite={self.name} needs two texts: --text=TEXT --other=TEXT; each ends with its answer")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        clean, corrupted = (_tokens(run, name, text) for name, text in _texts(options).items())
        if len(clean) != len(corrupted):
            raise UserError(f"--other: found {len(corrupted)} tokens; must have as many as --text, {len(clean)}")
        differs = bool((clean[:-1] != corrupted[:-1]).any())
        require(differs, "--other", options.other, "must differ from --text before its last token")
        pair = patching.TextPair(clean[:-1], corrupted[:-1], int(clean[-1]), int(corrupted[-1]))
        with budget.shown("activation patching", patching.cost(run.model, len(clean) - 1)):
            effects = patching.patch(run.model, pair)
        of_heads = effects.heads_NH if budget.current.get() is None else effects.heads_NH[~np.isnan(effects.heads_NH)]
        base.check_finite(run, [effects.clean, effects.corrupted, *of_heads.flat])
        gone_NH = removed.mask(run.trained.model, run.trained.model.head_numbers) == 0
        for effects_NH in (effects.heads_NH, effects.heads_NHL):
            if effects_NH is not None:
                effects_NH[gone_NH] = np.nan
        answers = (pair.clean_answer, None if clean[-1] == corrupted[-1] else pair.corrupted_answer)
        direct = None
        if attribution.is_sum(run.config.model):
            direct = attribution.attribute(run.model, pair.clean_L, *answers)
            direct = direct._replace(heads_NH=np.where(gone_NH, np.nan, direct.heads_NH))
        return {
            "clean": {"tokens": spans.decode_each(clean, run.tokenizer), "score": effects.clean},
            "corrupted": {"tokens": spans.decode_each(corrupted, run.tokenizer), "score": effects.corrupted},
            "score": "log-probability" if clean[-1] == corrupted[-1] else "logit difference",
            "by_place": {site: base.listed(effects_NL) for site, effects_NL in effects.by_place.items()},
            "heads": base.listed(effects.heads_NH),
            "heads_by_place": None if effects.heads_NHL is None else base.listed(effects.heads_NHL),
            "direct": direct and {name: base.listed(share) for name, share in direct._asdict().items()},
        }

    def rows(self, result: Result) -> list[Row]:
        places, rows = _labels(result), []
        for site, effects_NL in result["by_place"].items():
            for (layer, place), effect in np.ndenumerate(np.array(effects_NL, float)):
                rows.append(_row(site, layer, None, place, places[place], effect))
        for (layer, head), effect in np.ndenumerate(np.array(result["heads"], float)):
            rows.append(_row("head", layer, head, None, None, effect))
        by_place = np.array(result["heads_by_place"] or np.zeros((0, 0, 0)), float)
        for (layer, head, place), effect in np.ndenumerate(by_place):
            rows.append(_row("head", layer, head, place, places[place], effect))
        return [row for row in rows if not math.isnan(row["effect"])]  # NaN: left out

    def figure(self, result: Result) -> Figure:
        found = {site: np.array(effects_NL, float) for site, effects_NL in result["by_place"].items()}
        heads_NHL = None if result["heads_by_place"] is None else np.array(result["heads_by_place"], float)
        effects = patching.Effects(0, 0, found, np.array(result["heads"], float), heads_NHL)
        direct = result["direct"]
        direct_NX = direct and np.column_stack([direct["heads_NH"], direct["feed_forward_N"]]).astype(float)
        clean, corrupted = (base.quoted(result["request"][name]) for name in ("text", "other"))
        title = f"activations of {clean}, put into the pass on {corrupted}"
        return patching.patching_figure(effects, direct_NX, _labels(result), title=title)

    def printed(self, result: Result) -> str:
        """Return the scores of both texts, and the patches with the largest effects."""
        both = [f"{name}: {result[name]['score']:.3f}" for name in ("clean", "corrupted")]
        largest = sorted(self.rows(result), key=lambda row: -abs(row["effect"]))[:PRINTED]
        head = f"{result['score']} of the answers, in nats: {', '.join(both)}"
        return f"{head}\n\n{results.table(largest)}"


def _texts(options: SuiteOptions) -> dict[str, str]:
    assert options.text is not None and options.other is not None
    return {"--text": options.text, "--other": options.other}


def _tokens(run: Run, flag: str, text: str) -> np.ndarray:
    tokens = run.tokenizer.encode(text).astype(np.int32)
    require(len(tokens) > 1, flag, text, "needs at least two tokens: the last one is the answer")
    run.config.model.check_length(len(tokens) - 1)
    return tokens


def _labels(result: Result) -> list[str]:
    """Return a label for each place: its token, or both tokens if the texts differ there."""
    tokens = zip(*(map(token_label, result[name]["tokens"][:-1]) for name in ("clean", "corrupted")), strict=True)
    return [clean if clean == corrupted else f"{clean}/{corrupted}" for clean, corrupted in tokens]


def _row(site: str, layer: int, head: int | None, place: int | None, token: str | None, effect: Any) -> Row:
    return {"site": site, "layer": layer, "head": head, "place": place, "token": token, "effect": float(effect)}
