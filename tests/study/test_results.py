"""Results of runs on disk: damaged ones are not taken into the tables of a study."""

import json
import re

import numpy as np

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.evaluation import items
from mini_gpt.evaluation.items import Items
from mini_gpt.runtime import files
from mini_gpt.study import figures, tables
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.results import Results
from mini_gpt.suites import SUITES
from mini_gpt.suites import results as result_files
from tests.faults.test_commands import DAMAGED

ROW = {"length": 32, "stride": 32, "protocol": "blocks", "status": "ok", "reason": None, "nll": 1.0}
ROW |= {"perplexity": 2.7, "bits_per_byte": None, "sample_nll": 1.0, "tokens_scored": 100}
ITEMS = items.packed({"nll": Items(np.array([-1.0, 2.0]), np.array([50.0, 50.0]))})["nll"]
UNDEFINED = ROW | {"status": "undefined", "reason": "too long", "nll": None, "perplexity": None, "sample_nll": None}
WRONG_ROWS = [
    [],
    {},
    "rows",
    5,
    [5],
    ["row"],
    [[]],
    [ROW | {"length": "32"}],
    [ROW | {"length": None}],
    [ROW | {"nll": "1.0"}],
    [ROW | {"nll": [1.0]}],
    [ROW | {"nll": True}],
    [ROW | {"nll": float("nan")}],
    [ROW | {"nll": 10**400}],
    [ROW | {"reason": ["too long"]}],
    [{name: value for name, value in ROW.items() if name != "protocol"}],
    [{name: value for name, value in ROW.items() if name != "sample_nll"}],
    [ROW | {"tokens_scored": [100]}],
    [ROW | {"problems": "100"}],
    *([ROW | {"items": wrong}] for wrong in (5, ["nll"], {"nll": "text"}, {"nll": [5, 5]})),
    *([ROW | {"items": {"nll": [ITEMS[0], wrong]}}] for wrong in ("é", "AAA", "AAAA", "", ITEMS[1] * 2)),
    [ROW | {"items": {"nll": ITEMS[:1]}}],
    [ROW | {"items": {"nll": [ITEMS[1], ITEMS[0]]}}],
]


def write_run(folder, run, suite, content=""):
    """Write the files of a trained run; content: of its result. Return the path of the result."""
    path = folder / run.name / "eval" / f"{suite}.json"
    path.parent.mkdir(parents=True)
    corpus = corpora.open_corpus(run.config.data)
    files.write_json(folder / run.name / "config.json", loading.to_dict(run.config))
    files.write_json(folder / run.name / "corpus.json", {"name": corpus.name, "fingerprint": corpus.fingerprint})
    path.write_text(content)
    return path


def test_damaged_results_are_not_taken_into_tables(overrides, tmp_path, caplog):
    suites = {"extrapolation": {}}
    plan = Plan("sweep", Study("", "configs/default.py", {"rope": {}}, [0], suites, overrides=overrides))
    (run,) = plan.runs
    path = write_run(tmp_path, run, "extrapolation", "{}")

    def taken(content):
        caplog.clear()
        path.write_bytes(content.encode(errors="surrogateescape"))
        results = Results(plan, tmp_path)
        said = caplog.text
        assert bool(results.missing_now(run)) == ("extrapolation" not in results.by_run[run.name])
        assert caplog.text == said  # a second reading does not repeat the warning
        return results.by_run[run.name].get("extrapolation")

    right = {"checkpoint_step": 4, "request": {"lengths": None, "strides": None}, "train_length": 32}
    right |= {"rows": [ROW, UNDEFINED, ROW | {"items": {"nll": ITEMS}}]}
    assert taken(json.dumps(right)) == right and not caplog.text
    sealed = result_files.json_text(right)
    assert taken(sealed) == right and not caplog.text
    damaged = [json.dumps(right | {"rows": rows}) for rows in WRONG_ROWS] + [*DAMAGED.values(), json.dumps(right)[:-9]]
    damaged += [sealed.replace('"nll": 1.0', '"nll": 1.5')]
    damaged += [json.dumps(right | {"train_length": length}) for length in ([32], "32", True)]
    for content in damaged:
        assert taken(content) is None, content[:200]
        assert re.search(
            r"extrapolation\.json is damaged \(\w+: .{1,300}\) and counts as missing: `run` measures it again$",
            caplog.text.strip(),
        )
    for other in ({"checkpoint_step": 3}, {"checkpoint_step": None}, {"request": {}}, {"request": []}):
        assert taken(json.dumps(right | other)) is None and not caplog.text


def test_a_varied_field_keeps_its_value_in_the_tables(overrides, tmp_path):
    """The result has a context length too: that of the model that was measured."""
    conditions = {"short": {"context_length": 16}, "long": {"context_length": 64}}
    shared = {name: value for name, value in overrides.items() if name != "context_length"}
    study = Study("", "configs/default.py", conditions, [0], {"perplexity": {}}, overrides=shared)
    plan = Plan("sweep", study)
    for run in plan.runs:
        result = {"checkpoint_step": 4, "context_length": 32, "nll": 1.0, "bits_per_byte": 2.0}
        write_run(tmp_path, run, "perplexity", json.dumps(result))
    rows = Results(plan, tmp_path).rows("perplexity")
    table = tables.gather(SUITES["perplexity"], rows, conditions)
    assert [(row["condition"], row["context_length"], row["length"]) for row in table] == [
        ("short", "16", 32),
        ("long", "64", 32),
    ]
    figures.by_length(SUITES["perplexity"], table, None)
