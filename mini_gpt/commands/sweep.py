"""Train and evaluate every combination of some fields' values, with several seeds each, and compare them.

python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\
    --vary model.position=none,learned,sinusoidal,rope,alibi,t5

Each combination and seed is a run directory inside the sweep's directory. If a sweep was stopped, the same command
resumes it: it skips complete runs and tries failed ones again.
"""

import itertools
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from mini_gpt.commands import command_line, suites, sweep_tables
from mini_gpt.commands.results import ResultFiles
from mini_gpt.commands.suite_options import SuiteOptions
from mini_gpt.commands.suites import SUITES
from mini_gpt.commands.suites.base import Result
from mini_gpt.commands.sweep_tables import Values
from mini_gpt.config import loading as configs
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run

log = logging.getLogger("mini_gpt.sweep")


@dataclass(frozen=True)
class Sweep:
    """What is varied, measured, and where.

    config_path, overrides: the config that all runs share. vary: the values of each varied field. seeds: how many.
    suite: the name of the suite. workdir: the directory of the sweep.
    """

    config_path: str
    overrides: dict[str, str]
    vary: dict[str, list[str]]
    seeds: int
    suite: str
    options: SuiteOptions
    workdir: Path

    def any_config(self) -> Config:
        """Return the config of the first valid combination. Raise UserError if none is valid."""
        for values in self.combinations():
            try:
                return configs.load(self.config_path, self.overrides | dict(zip(self.vary, values, strict=True)))
            except UserError as error:
                invalid = error
        raise invalid

    def combinations(self) -> list[Values]:
        return list(itertools.product(*self.vary.values()))

    def run(self) -> None:
        """Train and measure what is missing, and write SUITE.csv, .md and .png.

        Raise UserError at the end if a combination failed; the others are complete and compared.
        """
        first_seed = self.any_config().seed
        results: dict[Values, list[Result]] = {values: [] for values in self.combinations()}
        failures, total = [], len(results) * self.seeds
        number = itertools.count(1)
        for seed in range(first_seed, first_seed + self.seeds):
            for values in results:
                fields = dict(zip(self.vary, values, strict=True)) | {"seed": str(seed)}
                name = ",".join(f"{field}={value}" for field, value in fields.items())
                log.info(f"[{next(number)} of {total}] {name}")
                try:
                    results[values].append(self._result(self.overrides | fields, self.workdir / files.plain_name(name)))
                except UserError as error:
                    failures.append(f"{name}: {error}")
                except Exception as error:  # one combination must not stop the others
                    log.exception("%s failed", name)
                    failures.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                jax.clear_caches()  # the next combination cannot use these programs, and they pile up
            if any(results.values()):  # after each seed, so that a stopped sweep has tables too
                text = self._write(results, failures)
        if any(results.values()):
            print(text)
        if failures:
            log.info("\n".join(["", "Failed:", *(f"  {failure}" for failure in failures), ""]))
            raise UserError(f"{len(failures)} of {total} combinations failed; the same command tries them again")

    def _result(self, overrides: dict[str, str], workdir: Path) -> Result:
        """Return the result of one run: read from disk if it is complete, else after training and measuring.

        Raise UserError before any training if the run could not be measured.
        """
        config, suite = configs.load(self.config_path, overrides), SUITES[self.suite]
        suite.check(config, self.options)
        workdirs.check_same_config(workdir, config)
        result = self._complete_result(config, workdir)
        if result is not None:
            log.info("complete")
            return result
        if suite.scores_split:
            corpus = corpora.open_corpus(config.data)
            tokenizer = workdirs.find_tokenizer(workdir, config, corpus) or tokenizers.fit(corpus, config.data)
            store = token_store.open_store(corpus, config.data, tokenizer)
            suite.check_split(config, self.options, len(store.split(self.options.split).tokens))
        loop.train(config, workdir, conclude=False)
        return suites.evaluate(Run(workdir), self.suite, self.options)

    def _complete_result(self, config: Config, workdir: Path) -> Result | None:
        """Return the result on disk, or None if it is missing, damaged, or of another step or other options.

        Raise UserError if the corpus has changed since.
        """
        try:
            path = workdir / "eval" / f"{suites.file_stem(self.suite, self.options)}.json"
            result = files.read_json(path)
            if result["checkpoint_step"] != config.train.steps:
                return None
            if result.get("request", {}) != suites.requested(self.suite, self.options):
                return None
            workdirs.check_corpus(workdir, corpora.open_corpus(config.data))
            return result
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _write(self, results: dict[Values, list[Result]], failures: list[str]) -> str:
        """Write the tables and the figure. Return the Markdown, and the paths of the files."""
        suite, fields = SUITES[self.suite], list(self.vary)
        table = sweep_tables.gather(suite, fields, results)
        trained = {result.get("train_length") for runs in results.values() for result in runs}
        text = f"{self.suite} of the {self.options.split} split\n\n{sweep_tables.markdown(suite, fields, table)}"
        text += "".join(f"\nfailed: {failure}\n" for failure in failures)
        written = ResultFiles(self.workdir, suites.file_stem(self.suite, self.options))
        written.write_csv(sweep_tables.csv_rows(table))
        written.write(".md", text)
        trained_length = trained.pop() if len(trained) == 1 else None
        written.write(".png", sweep_tables.figure(suite, fields, table, trained_length))
        return f"{text}\nWritten to {self.workdir}/{written.stem}.csv, .md and .png"


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Return the field and the values of FIELD=VALUE,VALUE,…; a comma inside brackets separates nothing."""
    name, listed = configs.parse_override(text)
    configs.check_field(name)
    if name == "seed":
        raise UserError("--vary: found seed; give the number of seeds with --seeds")
    values = [value.strip() for value in re.split(r",(?![^(\[]*[)\]])", listed)]
    if "" in values or len(set(values)) < len(values):
        raise UserError(f"--vary: found {text!r}; must be FIELD=VALUE,VALUE,… with different values")
    return name, values


def _parse() -> Sweep:
    """Read the command line. Raise UserError for a sweep that cannot run."""
    compared = ", ".join(name for name, suite in SUITES.items() if suite.values)
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.sweep")
    add = parser.add_argument
    add("--config", required=True, help="config file, such as configs/positions.py")
    add("--vary", action="append", required=True, metavar="FIELD=VALUE,VALUE,…", help="a field's values; repeatable")
    add("--seeds", type=int, default=1, help="number of seeds, counted from the seed of the config")
    add("--suite", default="perplexity", help=f"one of {compared}")
    add("--workdir", type=command_line.directory, help="directory of the sweep; default: runs/sweeps/ and a name")
    command_line.add_suite_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides, vary = command_line.config_overrides(rest), {}
    for name, values in map(parse_vary, flags.vary):
        if name in vary:
            raise UserError(f"--vary: found {name} twice; give all its values in one")
        if name in overrides:
            raise UserError(f"--vary: found {name}, which --config.{name} sets as well; give it once")
        vary[name] = values
    if flags.seeds < 1:
        raise UserError(f"--seeds: found {flags.seeds}; must be at least 1")
    options = SuiteOptions(flags.split, flags.lengths, flags.strides)
    suites.check([flags.suite], options)
    if not SUITES[flags.suite].values:
        raise UserError(f"--suite={flags.suite} is not supported by a sweep; must be one of {compared}")
    workdir = flags.workdir or _default_workdir(flags.config, overrides, list(vary))
    return Sweep(flags.config, overrides, vary, flags.seeds, flags.suite, options, workdir)


def _default_workdir(config_path: str, overrides: dict[str, str], fields: list[str]) -> Path:
    """Return a path such as runs/sweeps/tiny,train.steps=5,model.position."""
    name = ",".join([command_line.run_name(config_path, overrides), *fields])
    return Path("runs") / "sweeps" / files.plain_name(name)


@command_line.command
def main() -> None:
    sweep = _parse()
    config = sweep.any_config()
    SUITES[sweep.suite].check(config, sweep.options)
    command_line.set_up(config.data.cache_dir)
    sweep.run()


if __name__ == "__main__":
    main()
