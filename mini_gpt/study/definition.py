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
from mini_gpt.study import statistics
from mini_gpt.study.field_types import check as check_types
from mini_gpt.suites import SUITES
from mini_gpt.suites import check as check_suites
from mini_gpt.suites.base import SuiteOptions

CLAIMS = ("lower", "higher")
SEED_FIELDS = ("seed", "data.seed")
# Fields of config.data that decide which text is measured.
TEXT_FIELDS = ("corpus", "path", "target_path", "pair", "split", "split_fractions")
# Fields that may differ between machines; the text is compared by its fingerprint.
PLACES = ("data.path", "data.target_path", "data.cache_dir")


@dataclass(frozen=True)
class Contrast:
    """The claim that a metric is lower (or higher) in the condition `first` than in the condition `second`.

    lengths: such as "1x,256"; 1x is the trained length; None: all lengths of the suite.
    label: which rows, if the suite has several for one length, such as "blocks".
    smallest_effect: None: that of the study.
    """

    first: str
    claim: str
    second: str
    suite: str
    metric: str
    lengths: str | None = None
    label: str = ""
    smallest_effect: float | None = None


@dataclass(frozen=True)
class Fit:
    """The criterion by which a run has learned: the metric at `length` is at most, or at least, a threshold."""

    suite: str
    metric: str
    at_most: float | None = None
    at_least: float | None = None
    length: str = "1x"
    label: str = ""

    def holds(self, value: float | None) -> bool:
        if value is None:
            return False
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        bounds = [f"at most {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f"at least {self.at_least:g}"] if self.at_least is not None else []
        where = ", ".join(filter(None, [self.suite, self.label, f"length {self.length}"]))
        return f"{self.metric} {' and '.join(bounds)} ({where})"


@dataclass(frozen=True)
class Study:
    """A question, and the runs and comparisons that answer it.

    config: a config file.
    conditions: {name: config fields}.
    seeds: each condition is trained with each.
    suites: {name: options}.
    overrides: config fields of all conditions.
    smallest_effect: the smallest difference that matters, in the unit of the metric; 0: any.
    fit: when a run has learned.
    expected_deviation: the expected standard deviation, over seeds, of a paired difference. From it `plan` derives the
      difference that can be shown.
    level: the family-wise error rate; intervals cover 1 - level.
    seed_field: "seed" (data.seed follows it), or "data.seed" to vary only the order of data. To fix the order, give
      data.seed in the overrides.
    """

    question: str
    config: str
    conditions: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    suites: Mapping[str, SuiteOptions]
    contrasts: Sequence[Contrast] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    smallest_effect: float = 0.0
    fit: Fit | None = None
    expected_deviation: float | None = None
    level: float = 0.05
    seed_field: str = "seed"


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

    name: of the study.
    places: values of PLACES on this machine.
    configs: of each condition, with the first seed.
    runs: seed by seed.
    comparisons: the family of Holm's correction.
    """

    def __init__(self, name: str, study: Study, places: Mapping[str, str] = MappingProxyType({})):
        self.name, self.study, self.places = name, study, dict(places)
        _check_fields(study)
        self.configs = {condition: self._load(condition, study.seeds[0]) for condition in study.conditions}
        _check_different(self.configs, "have the same config")
        for suite, options in study.suites.items():
            for config in self.configs.values():
                SUITES[suite].check(config, options)
        self.comparisons = [one for contrast in study.contrasts for one in self._comparisons(contrast)]
        repeated = [one for one in self.comparisons if self.comparisons.count(one) > 1]
        if repeated:
            raise UserError(f"contrasts: found {repeated[0]} at length {repeated[0].length} twice; give it once")
        if self.comparisons and study.level / len(self.comparisons) < statistics.SMALLEST_P:
            remedy = f"give fewer, or a larger level: at {study.level:g}, no number of seeds can show a difference"
            raise UserError(f"contrasts: found {len(self.comparisons)} comparisons; {remedy}")
        if study.fit is not None:
            check_types("fit", study.fit, Fit)
            bounded = (study.fit.at_most, study.fit.at_least) != (None, None)
            require(bounded, "fit", study.fit.metric, "needs at_most or at_least")
            for name, bound in (("at_most", study.fit.at_most), ("at_least", study.fit.at_least)):
                require(bound is None or math.isfinite(bound), f"fit: {name}", bound, "must be finite")
            for condition in study.conditions:
                self.fit_length(condition)

    @functools.cached_property
    def runs(self) -> list[PlannedRun]:
        return [
            PlannedRun(condition, seed, self._load(condition, seed))
            for seed in self.study.seeds
            for condition in self.study.conditions
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in the form of JSON. The configs belong to it: a changed config file is a changed plan."""
        fields = dataclasses.asdict(self.study) | {"seeds": list(self.study.seeds)}
        loaded = {condition: loading.flatten(loading.to_dict(config)) for condition, config in self.configs.items()}
        shared = {
            condition: {name: value for name, value in values.items() if name not in PLACES}
            for condition, values in loaded.items()
        }
        return json.loads(json.dumps({"name": self.name, **fields, "configs": shared}))

    def changes_since(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields that differ from a saved `to_dict`."""
        current = self.to_dict()
        names = [name for name in current if name != "configs" and current[name] != saved.get(name)]
        for condition, config in self.configs.items():
            try:
                places = {place: loading.flatten(loading.to_dict(config))[place] for place in PLACES}
                old = loading.from_dict(saved["configs"][condition] | places)
            except (UserError, KeyError, TypeError):
                names.append(f"configs of {condition}")
            else:
                names += [f"{name} of {condition}" for name in loading.differences(old, config)]
        return names

    def fit_length(self, condition: str) -> int:
        """Return the length at which `fit` is checked. Raises UserError if the suite does not measure it."""
        assert self.study.fit is not None
        found = self._measured_lengths("fit", self.study.fit, condition, self.study.fit.length)
        require(len(found) == 1, "fit: length", self.study.fit.length, "must be one length")
        return found[0]

    def _load(self, condition: str, seed: int) -> Config:
        study = self.study
        fields = {**study.overrides, **study.conditions[condition], **self.places, study.seed_field: seed}
        try:
            return loading.load(study.config, fields)
        except UserError as error:
            raise UserError(f"{error} (condition {condition})" if len(study.conditions) > 1 else str(error)) from None

    def _comparisons(self, contrast: Contrast) -> list[Comparison]:
        check_types("contrasts", contrast, Contrast)
        for condition in (contrast.first, contrast.second):
            _check_known("contrasts", condition, self.study.conditions, "condition")
        require(contrast.first != contrast.second, "contrasts", contrast.first, "must compare different conditions")
        for name in TEXT_FIELDS:
            first, second = (getattr(self.configs[one].data, name) for one in (contrast.first, contrast.second))
            remedy = f"{contrast.second} has {second!r}; a contrast needs conditions that are measured on the same text"
            require(first == second, f"contrasts: data.{name} of {contrast.first}", first, remedy)
        require(contrast.claim in CLAIMS, "contrasts", contrast.claim, "the claim must be lower or higher")
        lengths = self._measured_lengths("contrasts", contrast, contrast.first, contrast.lengths)
        for length in lengths:  # the other condition may have another trained length
            self._measured_lengths("contrasts", contrast, contrast.second, str(length))
        smallest = self.study.smallest_effect if contrast.smallest_effect is None else contrast.smallest_effect
        is_valid = 0 <= smallest < math.inf
        require(is_valid, "contrasts: smallest_effect", smallest, "must be finite and not negative")
        start = (contrast.first, contrast.claim, contrast.second, contrast.suite, contrast.metric, contrast.label)
        return [Comparison(*start, length, smallest) for length in lengths]

    def _measured_lengths(self, field: str, asked: Contrast | Fit, condition: str, lengths: str | None) -> list[int]:
        """Return the lengths in a text such as 1x,256. Raises UserError if the suite does not measure one of them."""
        config = self.configs[condition]
        _check_known(field, asked.suite, self.study.suites, "suite of this study")
        _check_known(field, asked.metric, SUITES[asked.suite].values, f"metric of the suite {asked.suite}")
        rows = SUITES[asked.suite].compared(config, self.study.suites[asked.suite])
        _check_known(
            f"{field}: label", asked.label, dict.fromkeys(label for label, _ in rows), "label of the suite's rows"
        )
        measured = [length for label, length in rows if label == asked.label]
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
        study = module.get_study()
        require(
            isinstance(study, Study), f"{file}: get_study()", study, "must return a mini_gpt.study.definition.Study"
        )
        return Plan(file.stem, study, overrides)

    return loading.call(file, plan)  # names the file in errors, such as for a field of a wrong type


def _check_fields(study: Study) -> None:
    check_types("study", study, Study, leave_out=["seeds"])
    require(bool(study.conditions), "conditions", dict(study.conditions), "must have at least one")
    # Some file systems ignore the case of names.
    directories = {name: files.plain_name(name).casefold() for name in study.conditions}
    _check_different(directories, "have the same directory")
    for name, fields in study.conditions.items():
        # Matplotlib reads $ as mathematics, and leaves names with _ out of legends.
        is_named = isinstance(name, str) and name.strip() == name != "" and "$" not in name and name[0] != "_"
        require(is_named, "conditions", name, "must not be empty, contain $, start with _, or have spaces at its ends")
        require(isinstance(fields, Mapping), f"conditions: {name}", fields, "must be a mapping of config fields")
        for own in fields:
            taken = own in study.overrides or own == study.seed_field
            require(not taken, f"conditions: {name}", own, "is given for all conditions as well; give it once")
    seeds = list(study.seeds) if isinstance(study.seeds, Iterable) else []
    is_valid = all(type(seed) is int and seed >= 0 for seed in seeds) and 0 < len(seeds) == len(set(seeds))
    require(is_valid, "seeds", study.seeds, "must be distinct whole numbers, each at least 0, such as range(5)")
    require(study.seed_field in SEED_FIELDS, "seed_field", study.seed_field, "must be seed or data.seed")
    require(study.seed_field not in study.overrides, "overrides", study.seed_field, "it is given by seeds")
    require(0 < study.level < 1, "level", study.level, "must be above 0 and below 1")
    effect = study.smallest_effect
    require(0 <= effect < math.inf, "smallest_effect", effect, "must be finite and not negative")
    deviation = study.expected_deviation
    is_valid = deviation is None or 0 < deviation < math.inf
    require(is_valid, "expected_deviation", deviation, "must be finite and above 0")
    require(bool(study.suites), "suites", dict(study.suites), "must have at least one")
    for suite, options in study.suites.items():
        check_types(f"suites: {suite}", options, SuiteOptions)
        check_suites([suite], options)
        compared = ", ".join(name for name in SUITES if SUITES[name].values)
        require(bool(SUITES[suite].values), "suites", suite, f"has nothing to compare; must be one of {compared}")


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
