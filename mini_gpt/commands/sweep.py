"""Train and evaluate all combinations of field values with several seeds, and compare them.

python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\
    --vary model.position=none,learned,sinusoidal,rope,alibi,t5

Each combination and seed has a run directory inside the sweep's directory. The same command resumes a stopped sweep:
it skips complete runs and tries failed runs again.
"""

import dataclasses
import functools
import itertools
import logging
import re
from pathlib import Path

import jax

from mini_gpt.commands import command_line, suites, sweep_tables
from mini_gpt.commands import results as result_files
from mini_gpt.commands.suites import SUITES
from mini_gpt.commands.suites.base import Result, SuiteOptions
from mini_gpt.commands.sweep_tables import Combination
from mini_gpt.config import loading as configs
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.data.corpora import Corpus
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import assembly, loop
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run

log = logging.getLogger("mini_gpt.sweep")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep over the values of some fields.

    config_path, overrides: the config that all runs share. vary: the values of each varied field. seeds: the number
    of seeds. workdir: the directory of the sweep.
    """

    config_path: str
    overrides: dict[str, str]
    vary: dict[str, list[str]]
    seeds: int
    suite: str
    options: SuiteOptions
    workdir: Path

    def checked_configs(self) -> dict[Combination, Config]:
        """Return the config of each combination. Raise UserError if one is invalid or cannot be measured."""
        found = {
            combination: configs.load(self.config_path, self.overrides | dict(combination))
            for combination in self.combinations()
        }
        for config in found.values():
            SUITES[self.suite].check(config, self.options)
            if config.data.is_task:
                batches.check_fits(config)
        return found

    def combinations(self) -> list[Combination]:
        return list(itertools.product(*([(field, value) for value in self.vary[field]] for field in self.vary)))

    def run(self) -> None:
        """Train and measure the missing runs, and write SUITE.csv, .md and .png.

        Raise UserError at the start for invalid configs, or at the end if a run failed; the files have the other runs.
        """
        checked = self.checked_configs()
        first = next(iter(checked.values()))
        command_line.set_up(first.data.cache_dir)
        open_corpus = functools.cache(corpora.open_corpus)  # most combinations share a corpus
        for combination, config in checked.items():
            if not (self._run_directory(combination, first.seed) / workdirs.CONFIG).exists():
                self._check_new(config, open_corpus(config.data))
        self.workdir.mkdir(parents=True, exist_ok=True)  # one error here, not one for each run
        results: dict[Combination, list[Result]] = {combination: [] for combination in checked}
        failures, text, total = [], "", len(results) * self.seeds
        number = itertools.count(1)
        for seed in range(first.seed, first.seed + self.seeds):
            for combination, config in checked.items():
                name = _name(combination, seed)
                log.info(f"[{next(number)} of {total}] {name}")
                try:
                    workdir = self._run_directory(combination, seed)
                    result = self._result(dataclasses.replace(config, seed=seed), workdir)
                    results[combination].append(result)
                except UserError as error:
                    failures.append(f"{name}: {error}")
                except BrokenPipeError:  # nobody reads the output any more
                    raise
                except Exception as error:  # one failed run must not stop the others
                    log.exception("%s failed", name)
                    failures.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                jax.clear_caches()  # free compiled programs that the next combination cannot use
            if any(results.values()):  # after each seed, so that a stopped sweep has tables too
                text = self._write(results, failures)
        if text:
            print(text)
        if failures:
            log.info("\n".join(["", "Failed:", *(f"  {failure}" for failure in failures), ""]))
            raise UserError(f"{len(failures)} of {total} runs failed; the same command tries them again")

    def _run_directory(self, combination: Combination, seed: int) -> Path:
        return self.workdir / files.plain_name(_name(combination, seed))

    def _check_new(self, config: Config, corpus: Corpus) -> None:
        """Raise UserError if a new run of this config could not be trained or measured."""
        mesh, suite = assembly.make_mesh(config), SUITES[self.suite]
        tokenizer = token_store.fit_tokenizer(corpus, config.data)
        assembly.assemble(config, mesh, corpus, tokenizer)
        if suite.needs_text:
            tokens = token_store.open_store(corpus, config.data, tokenizer).tokens(self.options.split)
            suite.check_split(config, self.options, len(tokens))

    def _result(self, config: Config, workdir: Path) -> Result:
        """Return the result of one run. Train and measure the run if its result is not on disk."""
        workdirs.check_same_config(workdir, config)
        result = self._complete_result(config, workdir)
        if result is not None:
            log.info("complete")
            return result
        loop.train(config, workdir, conclude=False)
        return suites.evaluate(Run(workdir), self.suite, self.options)

    def _complete_result(self, config: Config, workdir: Path) -> Result | None:
        """Return the result on disk, or None if it is missing or damaged, or has another step or other options.

        Raise UserError if the corpus has changed since.
        """
        path = workdir / "eval" / f"{suites.file_stem(self.suite, self.options)}.json"
        try:
            result = files.read_with_checksum(path)
            sweep_tables.check(SUITES[self.suite], result)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            log.warning(f"{path} is damaged ({type(error).__name__}: {error}): the run is measured again")
            return None
        measured = result.get("checkpoint_step"), result.get("request", {})
        if measured != (config.train.steps, suites.requested(self.suite, self.options)):
            return None
        workdirs.check_corpus(workdir, corpora.open_corpus(config.data))
        return result

    def _write(self, results: dict[Combination, list[Result]], failures: list[str]) -> str:
        """Write the tables and the figure. Return the Markdown and the paths of the files."""
        suite, fields = SUITES[self.suite], list(self.vary)
        table = sweep_tables.gather(suite, fields, results)
        text = f"{self.suite} of the {self.options.split} split\n\n{sweep_tables.markdown(suite, fields, table)}"
        text += "".join(f"\nfailed: {failure}\n" for failure in failures)
        trained = {result.get("train_length") for runs in results.values() for result in runs}
        figure = sweep_tables.figure(suite, fields, table, trained.pop() if len(trained) == 1 else None)
        contents: result_files.Contents = {
            ".csv": result_files.csv_text(sweep_tables.csv_rows(table)),
            ".md": text,
            ".png": figure,
        }
        try:
            written = result_files.write(self.workdir, suites.file_stem(self.suite, self.options), contents)
        except (UserError, OSError):
            print(text)
            raise
        return "\n".join([text, "Written to", *map(str, written)])


def _name(combination: Combination, seed: int) -> str:
    return ",".join(f"{field}={value}" for field, value in (*combination, ("seed", seed)))


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Return the field and the values of FIELD=VALUE,VALUE,…; commas inside brackets do not separate values."""
    name, listed = configs.parse_override(text)
    configs.check_field(name)
    if name == "seed":
        raise UserError("--vary: found seed; give the number of seeds with --seeds")
    values = [value.strip() for value in re.split(r",(?![^(\[]*[)\]])", listed)]
    different = "" not in values and len(set(values)) == len(values)
    require(different, "--vary", text, "must be FIELD=VALUE,VALUE,… with different values")
    return name, values


def _parse() -> Sweep:
    """Read the command line. Raise UserError for a sweep that cannot run."""
    compared = ", ".join(name for name, suite in SUITES.items() if suite.values)
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.sweep")
    add = parser.add_argument
    add("--config", required=True, help="config file, such as configs/positions.py")
    add("--vary", action="append", required=True, metavar="FIELD=VALUE,VALUE,…", help="a field's values; repeatable")
    add("--seeds", type=int, default=1, help="number of seeds; the first is the seed of the config")
    add("--suite", default="perplexity", help=f"one of {compared}")
    add("--workdir", type=command_line.directory, help="directory of the sweep; default: runs/sweeps/NAME")
    command_line.add_suite_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides, vary = command_line.config_overrides(rest), {}
    for name, values in map(parse_vary, flags.vary):
        if name in vary:
            raise UserError(f"--vary: found {name} twice; give all its values in one --vary")
        if name in overrides:
            raise UserError(f"--vary: found {name}, which --config.{name} sets as well; give it once")
        vary[name] = values
    require(flags.seeds >= 1, "--seeds", flags.seeds, "must be at least 1")
    options = SuiteOptions(flags.split, flags.lengths, flags.strides)
    suites.check([flags.suite], options)
    if not SUITES[flags.suite].values:
        raise UserError(f"--suite={flags.suite} is not supported by a sweep; must be one of {compared}")
    workdir = flags.workdir or Path("runs", "sweeps", command_line.run_name(flags.config, overrides, *vary))
    return Sweep(flags.config, overrides, vary, flags.seeds, flags.suite, options, workdir)


@command_line.command
def main() -> None:
    _parse().run()


if __name__ == "__main__":
    main()
