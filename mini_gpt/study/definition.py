"""The definition of a study: conditions, seeds, suites and contrasts; everything is checked before the first run."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.evaluation import extrapolation
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require, shown, suggestion
from mini_gpt.study import statistics, syntax
from mini_gpt.suites import SUITES
from mini_gpt.suites import check as check_suites
from mini_gpt.suites.base import SuiteOptions

SEED_FIELDS = ("seed", "data.seed")
# Fields of config.data that decide which text is measured.
TEXT_FIELDS = ("corpus", "path", "target_path", "pair", "split", "split_fractions")
# Fields that may differ between machines; the text is compared by its fingerprint.
PLACES = ("data.path", "data.target_path")
NO_PLACES: Mapping[str, str] = MappingProxyType({})
Chosen = Mapping[str, float]  # {condition: its value of the field in `tune`}


class Fit(NamedTuple):
    """The criterion by which a run has learned: its metric is at most, or at least, a bound.

    length: such as 1x, the trained length.
    claim: lower or higher.
    """

    suite: str
    metric: str
    label: str
    length: str
    claim: str
    bound: float

    def holds(self, value: float | None) -> bool:
        return value is not None and (value <= self.bound if self.claim == "lower" else value >= self.bound)

    def __str__(self) -> str:
        where = ", ".join(filter(None, [self.suite, self.label, f"length {self.length}"]))
        return f"{self.metric} at {'most' if self.claim == 'lower' else 'least'} {self.bound:g} ({where})"


@dataclass(frozen=True)
class Study:
    """A question, and the runs and comparisons that answer it. A study file gives these fields as a dictionary.

    config: a config file.
    conditions: {name: config fields}, or texts as of `--vary`.
    seeds: each condition is trained with each.
    suites: {name: options}, such as {"extrapolation": {"lengths": "1x,2x"}}.
    contrasts: texts as of `--contrast`: CONDITION<CONDITION@METRIC,LENGTH. The condition `<` has the lower metric.
      Without lengths: all lengths of the suite. SUITE/METRIC names one of several suites that have the metric. The end
      may name the rows, as in "nll,2x,sliding, stride 32"; else they are the suite's first, such as blocks.
    overrides: config fields of all conditions.
    smallest_effect: the smallest difference that matters, in the unit of the metric, or {metric: difference}; 0: any.
    fit: when a run has learned, such as nll<=2.6 or exact_match,1x>=0.9; without a length: at the trained one.
    expected_deviation: the expected standard deviation, over seeds, of a paired difference. From it `plan` derives the
      difference that can be shown.
    level: the family-wise error rate; intervals cover 1 - level.
    seed_field: "seed" (data.seed follows it), or "data.seed" to vary only the order of data. To fix the order, give
      data.seed in the overrides.
    sizes: {name: config fields}: all conditions and contrasts are repeated at each, as SIZE,CONDITION.
    tune: {field: increasing values}, such as the learning rate. Each condition is compared with the value that has the
      lowest mean validation loss over the tuning_seeds.
    tuning_seeds: others than `seeds`.
    """

    question: str
    config: str
    conditions: Mapping[str, Mapping[str, Any]] | Sequence[str]
    seeds: Sequence[int]
    suites: Mapping[str, Mapping[str, Any]]
    contrasts: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    smallest_effect: float | Mapping[str, float] = 0.0
    fit: str | None = None
    expected_deviation: float | None = None
    level: float = 0.05
    seed_field: str = "seed"
    sizes: Mapping[str, Mapping[str, Any]] | None = None
    tune: Mapping[str, Sequence[float]] | None = None
    tuning_seeds: Sequence[int] | None = None


class Comparison(NamedTuple):
    """A contrast at one length, in tokens or in the unit of the task."""

    first: str
    claim: str
    second: str
    suite: str
    metric: str
    label: str
    length: int
    smallest_effect: float

    def __str__(self) -> str:
        return f"{self.first} {self.claim} than {self.second}"


class PlannedRun(NamedTuple):
    condition: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return files.plain_name(f"{self.condition},seed={self.seed}")


class Plan:
    """A study with all configs loaded. Raises UserError if a config, a suite or a contrast is invalid.

    places: values of PLACES on this machine.
    chosen: None before the tuning.
    conditions: at all sizes; `sized` has {name: (size, name without it)}.
    configs, untuned: of each condition, with the first seed; untuned: without the value that was chosen.
    comparisons: the family of Holm's correction.
    tuning: the plan of the runs that tune, or None. Its conditions are named in `tuned`: {name: (condition, value)}.
    """

    def __init__(self, name: str, study: Study, places: Mapping[str, str] = NO_PLACES, chosen: Chosen | None = None):
        self.name, self.study, self.places, self.chosen = name, study, dict(places), chosen
        given = study.conditions
        self.unsized = given if isinstance(given, Mapping) else syntax.conditions(given)
        sizes = study.sizes or {}
        self.sized = {f"{size},{each}": (size, each) for size in sizes for each in self.unsized}
        at_sizes = {name: {**sizes[size], **self.unsized[each]} for name, (size, each) in self.sized.items()}
        for name, (size, each) in self.sized.items():
            is_clear = len(at_sizes[name]) == len(sizes[size]) + len(self.unsized[each])
            require(is_clear, f"sizes: {size}", sizes[size], f"{each} has one of these fields as well; give it once")
        self.conditions = at_sizes if sizes else self.unsized
        self.suites = {suite: _options(suite, options) for suite, options in study.suites.items()}
        self.not_compared = (*PLACES, *(study.tune or ()))  # fields that may differ from a saved plan
        _check_conditions(study, self.conditions)
        _check_numbers(study)
        _check_tuning(study)
        self.configs = {condition: self._load(condition, study.seeds[0]) for condition in self.conditions}
        self.untuned = {condition: self._load(condition, study.seeds[0], tuned=False) for condition in self.conditions}
        _check_different(self.configs, "have the same config")
        for suite, options in self.suites.items():
            for config in self.configs.values():
                SUITES[suite].check(config, options)
        at = [(contrast, size) for contrast in study.contrasts for size in study.sizes or [None]]
        self.comparisons = [one for contrast, size in at for one in self._comparisons(contrast, size)]
        repeated = [one for one in self.comparisons if self.comparisons.count(one) > 1]
        if repeated:
            raise UserError(f"contrasts: found {repeated[0]} at length {repeated[0].length} twice; give it once")
        if self.comparisons and study.level / len(self.comparisons) < statistics.SMALLEST_P:
            remedy = f"give fewer, or a larger level: at {study.level:g}, no number of seeds can show a difference"
            raise UserError(f"contrasts: found {len(self.comparisons)} comparisons; {remedy}")
        self.fit = None if study.fit is None else self._fit(study.fit)
        for condition in self.conditions if self.fit else ():
            self.fit_length(condition)
        grid = [(field.rpartition(".")[2], value) for field, values in (study.tune or {}).items() for value in values]
        self.tuned = {f"{each},{field}={value}": (each, value) for each in self.conditions for field, value in grid}
        self.tuning = self._tuning() if self.tuned else None
        self.is_untuned = self.tuning is not None and chosen is None

    @functools.cached_property
    def runs(self) -> list[PlannedRun]:
        return [
            PlannedRun(condition, seed, self._load(condition, seed))
            for seed in self.study.seeds
            for condition in self.conditions
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in the form of JSON. The configs belong to it: a changed config file is a changed plan."""
        fields = dataclasses.asdict(self.study) | {"seeds": list(self.study.seeds), "conditions": self.conditions}
        fields |= {"tuning_seeds": list(self.study.tuning_seeds)} if self.study.tuning_seeds else {}
        fields |= {"suites": {name: dataclasses.asdict(options) for name, options in self.suites.items()}}
        fields |= {"contrasts": [one[:-1] for one in self.comparisons], "fit": self.fit}
        loaded = {condition: loading.flatten(loading.to_dict(config)) for condition, config in self.untuned.items()}
        shared = {
            condition: {name: value for name, value in values.items() if name not in self.not_compared}
            for condition, values in loaded.items()
        }
        return json.loads(json.dumps({"name": self.name, **fields, "configs": shared}))

    def changes_since(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields that differ from a saved `to_dict`."""
        current = self.to_dict()
        names = [name for name in current if name != "configs" and current[name] != saved.get(name)]
        for condition, config in self.untuned.items():
            try:
                current = loading.flatten(loading.to_dict(config))
                same = {name: current[name] for name in self.not_compared}
                old = loading.from_dict(saved["configs"][condition] | same)
            except (UserError, KeyError, TypeError):
                names.append(f"configs of {condition}")
            else:
                names += [f"{name} of {condition}" for name in loading.differences(old, config)]
        return names

    def fit_length(self, condition: str) -> int:
        """Return the length at which `fit` is checked. Raises UserError if the suite does not measure it."""
        assert self.fit is not None
        found = self._measured("fit", *self.fit[:3], condition, self.fit.length)
        require(len(found) == 1, "fit: length", self.fit.length, "must be one length")
        return found[0]

    def _tuning(self) -> "Plan":
        study, field = self.study, next(iter(self.study.tune or ()))
        conditions = {name: {**self.conditions[each], field: value} for name, (each, value) in self.tuned.items()}
        is_task = next(iter(self.configs.values())).data.is_task
        suites: Mapping[str, Any] = {"tasks": {"lengths": "1x"}} if is_task else {"perplexity": {}}
        seeds, shared = study.tuning_seeds or (), study.overrides
        runs = Study("", study.config, conditions, seeds, suites, (), shared, seed_field=study.seed_field)
        return Plan(self.name, runs, self.places)

    def _load(self, condition: str, seed: int, tuned: bool = True) -> Config:
        study = self.study
        chosen = {name: self.chosen[condition] for name in study.tune or ()} if self.chosen and tuned else {}
        fields = {**study.overrides, **self.conditions[condition], **chosen, **self.places, study.seed_field: seed}
        try:
            return loading.load(study.config, fields)
        except UserError as error:
            raise UserError(f"{error} (condition {condition})" if len(self.conditions) > 1 else str(error)) from None

    def _comparisons(self, text: str, size: str | None) -> list[Comparison]:
        first, claim, second, where = syntax.parse_contrast(text, self.unsized)
        require(first != second, "contrasts", first, "must compare different conditions")
        first, second = (name if size is None else f"{size},{name}" for name in (first, second))
        for name in TEXT_FIELDS:
            values = [getattr(self.configs[one].data, name) for one in (first, second)]
            remedy = f"{second} has {values[1]!r}; a contrast needs conditions that are measured on the same text"
            require(values[0] == values[1], f"contrasts: data.{name} of {first}", values[0], remedy)
        suite, metric, label, lengths = self._where("contrasts", where or self._first_metric(), first)
        found = self._measured("contrasts", suite, metric, label, first, lengths)
        for length in found:  # the other condition may have another trained length
            self._measured("contrasts", suite, metric, label, second, str(length))
        effect = self.study.smallest_effect
        smallest = effect.get(metric, 0.0) if isinstance(effect, Mapping) else effect
        return [Comparison(first, claim, second, suite, metric, label, length, smallest) for length in found]

    def _fit(self, text: str) -> Fit:
        parts = syntax.FIT.fullmatch(text)
        try:
            bound = float(parts["bound"]) if parts else math.nan
        except ValueError:
            bound = math.nan
        require(math.isfinite(bound), "fit", text, "must be METRIC<=NUMBER or METRIC>=NUMBER, such as nll<=2.6")
        assert parts is not None
        suite, metric, label, lengths = self._where("fit", parts["where"], next(iter(self.conditions)))
        return Fit(suite, metric, label, lengths or "1x", syntax.CLAIMS[parts["claim"]], bound)

    def _first_metric(self) -> str:
        suite = next(iter(self.suites))
        return f"{suite}/{SUITES[suite].values[0]}"

    def _where(self, field: str, text: str, condition: str) -> tuple[str, str, str, str | None]:
        """Return suite, metric, label and lengths of a text such as nll,2x."""
        parts = syntax.WHERE.fullmatch(text.strip())
        require(parts is not None, field, text, "must be METRIC,LENGTH,…, such as nll,2x")
        assert parts is not None
        metric, having = parts["metric"], [name for name in self.suites if parts["metric"] in SUITES[name].values]
        known = dict.fromkeys(value for name in self.suites for value in SUITES[name].values)
        _check_known(field, metric, known, "metric of the suites")
        if parts["suite"] is not None:
            _check_known(field, parts["suite"], having, f"suite of this study with {metric}")
        elif len(having) > 1:
            raise UserError(
                f"{field}: found {metric}, which {' and '.join(having)} have; name one: {having[0]}/{metric}"
            )
        suite = parts["suite"] or having[0]
        label = parts["label"] or SUITES[suite].compared(self.configs[condition], self.suites[suite])[0][0]
        return suite, metric, label, parts["lengths"].lstrip(",") or None

    def _measured(
        self, field: str, suite: str, metric: str, label: str, condition: str, lengths: str | None
    ) -> list[int]:
        """Return the lengths in a text such as 1x,256. Raises UserError if the suite does not measure one of them."""
        config = self.configs[condition]
        rows = SUITES[suite].compared(config, self.suites[suite])
        labels = dict.fromkeys(name for name, _ in rows)
        if label not in labels:
            others = "".join(f", or one of the rows {name!r}" for name in labels if name)
            raise UserError(f"{field}: found {label!r} after {metric}; must be a length such as 2x{others}")
        measured = [length for name, length in rows if name == label]
        trained = config.data.task_length if config.data.is_task else config.context_length
        found = measured if lengths is None else extrapolation.parse_lengths(f"{field}: lengths", lengths, trained, 1)
        for length in found:
            known = ", ".join(map(str, measured))
            require(length in measured, f"{field}: lengths", length, f"{condition} is measured at {known}")
        return list(found)


def load(path: str, overrides: Mapping[str, str]) -> Plan:
    """Return the plan of a study file, such as configs/studies/positions.py. Raises UserError for an invalid one.

    overrides: only the fields of PLACES; any other field belongs in the file.
    """
    for name in overrides:
        require(name in PLACES, f"--config.{name}", overrides[name], f"a study takes only {' and '.join(PLACES)} here")
    file, argument = loading.find_file(path, "study", "configs/studies/positions.py")
    require(file.suffix == ".py" and not argument, "study", path, "must be a Python file with get_study()")

    def plan(module: Any) -> Plan:
        given = module.get_study()
        require(isinstance(given, Mapping), "get_study()", given, "must return a dictionary with the fields of a study")
        for name in given:
            _check_known("get_study()", name, [one.name for one in dataclasses.fields(Study)], "field of a study")
        return Plan(file.stem, Study(**given), overrides)

    return loading.call(file, plan)  # names the file in errors, such as for a field of a wrong type


def _options(suite: str, given: Mapping[str, Any]) -> SuiteOptions:
    """Return the options of a suite. Raises UserError if they are invalid, or the suite has nothing to compare."""
    for name in given:
        _check_known(f"suites: {suite}", name, [one.name for one in dataclasses.fields(SuiteOptions)], "option")
    options = SuiteOptions(**given)
    check_suites([suite], options)
    compared = ", ".join(name for name in SUITES if SUITES[name].values)
    require(bool(SUITES[suite].values), "suites", suite, f"has nothing to compare; must be one of {compared}")
    return options


def _check_conditions(study: Study, conditions: Mapping[str, Mapping[str, Any]]) -> None:
    require(bool(conditions), "conditions", study.conditions, "must have at least one")
    # Some file systems ignore the case of names.
    directories = {name: files.plain_name(str(name)).casefold() for name in conditions}
    _check_different(directories, "have the same directory")
    for name, fields in conditions.items():
        # Matplotlib reads $ as mathematics, and leaves names with _ out of legends.
        is_named = isinstance(name, str) and name.strip() == name != "" and "$" not in name and name[0] != "_"
        require(is_named, "conditions", name, "must not be empty, contain $, start with _, or have spaces at its ends")
        for own in fields:
            taken = own in study.overrides or own == study.seed_field or own in (study.tune or ())
            require(not taken, f"conditions: {name}", own, "is given for all conditions as well; give it once")


def _check_seeds(field: str, given: Sequence[int]) -> None:
    seeds = list(given)
    is_valid = all(type(seed) is int and seed >= 0 for seed in seeds) and 0 < len(seeds) == len(set(seeds))
    require(is_valid, field, given, "must be distinct whole numbers, each at least 0, such as range(5)")


def _check_tuning(study: Study) -> None:
    if study.tune is None:
        require(study.tuning_seeds is None, "tuning_seeds", study.tuning_seeds, "is only for a study with tune")
        return
    require(len(study.tune) == 1, "tune", study.tune, "must be {field: values} with one field")
    ((field, values),) = study.tune.items()
    numbers = [value for value in values if type(value) in (int, float) and math.isfinite(value)]
    is_grid = len(numbers) > 1 and list(values) == sorted(set(numbers))
    require(is_grid, f"tune: {field}", values, "must be at least two numbers, each larger than the one before")
    require(field not in {*study.overrides, *SEED_FIELDS}, "tune", field, "is given by overrides or seeds as well")
    is_same_text = field.startswith(("model.", "optimizer.", "train."))
    require(is_same_text, "tune", field, "must be a field of model, optimizer or train, so that all have the same text")
    _check_seeds("tuning_seeds", study.tuning_seeds or ())
    is_new = not set(study.tuning_seeds or ()) & set(study.seeds)
    require(is_new, "tuning_seeds", study.tuning_seeds, "must not be among seeds: the comparison needs fresh ones")


def _check_numbers(study: Study) -> None:
    _check_seeds("seeds", study.seeds)
    require(study.seed_field in SEED_FIELDS, "seed_field", study.seed_field, "must be seed or data.seed")
    require(study.seed_field not in study.overrides, "overrides", study.seed_field, "it is given by seeds")
    require(0 < study.level < 1, "level", study.level, "must be above 0 and below 1")
    effects = study.smallest_effect
    for effect in effects.values() if isinstance(effects, Mapping) else [effects]:
        is_valid = type(effect) in (int, float) and 0 <= effect < math.inf
        require(is_valid, "smallest_effect", effect, "must be finite and not negative")
    deviation = study.expected_deviation
    is_valid = deviation is None or 0 < deviation < math.inf
    require(is_valid, "expected_deviation", deviation, "must be finite and above 0")
    require(bool(study.suites), "suites", study.suites, "must have at least one")


def _check_different(values: Mapping[str, Any], problem: str) -> None:
    names = list(values)
    for index, name in enumerate(names):
        same = [other for other in names[:index] if values[other] == values[name]]
        if same:
            raise UserError(f"conditions: {same[0]} and {name} {problem}; give different ones")


def _check_known(field: str, name: str, known: Iterable[str], kind: str) -> None:
    """Raise UserError, with similar names, if a name is not known."""
    listed = list(known)
    if name not in listed:
        hint = suggestion(name, listed, f"; must be one of {', '.join(listed)}")
        raise UserError(f"{field}: found {shown(name)}, which is no {kind}{hint}")
