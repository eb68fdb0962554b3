"""Checks of a study's runs with their corpora, before the first run."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, task_batches, token_store
from mini_gpt.data.corpora import Corpus
from mini_gpt.study.definition import Plan
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import assembly, settings, writers

log = logging.getLogger("mini_gpt.study")


def fingerprints(plan: Plan) -> dict[str, str]:
    """Return {condition: fingerprint of its corpus}."""
    open_corpus = functools.cache(corpora.open_corpus)
    texts = {condition: dataclasses.replace(config.data, seed=0) for condition, config in plan.configs.items()}
    return {condition: open_corpus(data).fingerprint for condition, data in texts.items()}


def check(plan: Plan, workdir: Path) -> None:
    """Raise UserError if a run that has not started cannot be trained or measured. Opens and tokenizes the corpora.

    Log once each setting that cannot take effect in such runs: the runs' own logs are in files.
    """
    open_corpus = functools.cache(corpora.open_corpus)  # most conditions share a corpus
    silent = of_other_conditions(plan)
    new = {run.condition for run in plan.runs if not (workdir / run.name / "config.json").exists()}
    found: dict[str, list[str]] = {}
    for condition, config in plan.configs.items():
        if config.data.is_task:
            task_batches.check_fits(config)
        if condition in new:
            for warning in _check_one(config, plan.suites, open_corpus):
                if (condition, warning) not in silent:
                    found.setdefault(warning, []).append(condition)
    for warning, conditions in found.items():
        more = f" and {len(conditions) - 3} more" if len(conditions) > 3 else ""
        log.warning(f"{warning} (conditions: {', '.join(conditions[:3])}{more})")


def of_other_conditions(plan: Plan) -> set[tuple[str, str]]:
    """Return (condition, line of `settings.unread`) of fields that another condition reads, and this does not set."""
    unread = {condition: settings.unread(config) for condition, config in plan.configs.items()}
    by_none = set.intersection(*map(set, unread.values()))
    return {
        (condition, line)
        for condition, lines in unread.items()
        for name, line in lines.items()
        if name not in by_none | plan.conditions[condition].keys()
    }


def _check_one(config: Config, suites: Mapping[str, SuiteOptions], open_corpus: Callable[..., Corpus]) -> list[str]:
    """Raise the errors of `check`, and return the warnings of a condition."""
    writers.check(config)
    mesh, corpus = assembly.make_mesh(config), open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    train_batches = assembly.assemble(config, mesh, corpus, tokenizer).objective.train_batches
    for suite, options in suites.items():
        if SUITES[suite].needs_text:
            tokens = token_store.open_store(corpus, config.data, tokenizer).tokens(options.split)
            SUITES[suite].check_split(config, options, len(tokens))
    return settings.without_effect(config, train_batches.rows_per_epoch)
