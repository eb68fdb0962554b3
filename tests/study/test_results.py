"""Results of runs on disk: damaged ones are not taken into the tables of a study."""

import json

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.runtime import files
from mini_gpt.study import figures, tables
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.results import Results
from mini_gpt.suites import SUITES
from mini_gpt.suites import results as result_files


def write_run(folder, run, suite, content=""):
    """Write the files of a trained run; content: of its result. Return the path of the result."""
    path = folder / run.name / "eval" / f"{suite}.json"
    path.parent.mkdir(parents=True)
    corpus = corpora.open_corpus(run.config.data)
    files.write_json(folder / run.name / "config.json", loading.to_dict(run.config))
    files.write_json(folder / run.name / "corpus.json", {"name": corpus.name, "fingerprint": corpus.fingerprint})
    path.write_text(content)
    return path


def test_only_whole_results_of_the_same_request_are_taken(overrides, tmp_path, caplog):
    study = Study("", "configs/default.py", {"rope": {}}, [0], {"extrapolation": {}}, overrides=overrides)
    plan = Plan("sweep", study)
    (run,) = plan.runs
    path = write_run(tmp_path, run, "extrapolation")
    right = {"checkpoint_step": 4, "request": {"lengths": None, "strides": None}, "train_length": 32, "rows": []}
    files.write_json(path, right)
    assert Results(plan, tmp_path).by_run[run.name] == {"extrapolation": right} and not caplog.text
    for other in ({"checkpoint_step": 3}, {"request": {}}):
        files.write_json(path, right | other)
        assert Results(plan, tmp_path).missing(run) and not caplog.text
    for content in ("{", "[]", json.dumps(right), result_files.json_text(right).replace("32", "33")):
        caplog.clear()
        path.write_text(content)
        assert Results(plan, tmp_path).missing(run) == ["extrapolation"]
        assert "extrapolation.json counts as missing (" in caplog.text


def test_a_varied_field_keeps_its_value_in_the_tables(overrides, tmp_path):
    """The result has a context length too: that of the model that was measured."""
    conditions = {"short": {"context_length": 16}, "long": {"context_length": 64}}
    shared = {name: value for name, value in overrides.items() if name != "context_length"}
    study = Study("", "configs/default.py", conditions, [0], {"perplexity": {}}, overrides=shared)
    plan = Plan("sweep", study)
    for run in plan.runs:
        result = {"checkpoint_step": 4, "context_length": 32, "nll": 1.0, "bits_per_byte": 2.0}
        write_run(tmp_path, run, "perplexity", result_files.json_text(result))
    rows = Results(plan, tmp_path).rows("perplexity")
    table = tables.gather(SUITES["perplexity"], rows, conditions)
    assert [(row["condition"], row["context_length"], row["length"]) for row in table] == [
        ("short", "16", 32),
        ("long", "64", 32),
    ]
    figures.by_length(SUITES["perplexity"], table, None)


def test_a_value_that_is_undefined_for_a_seed_has_no_mean():
    suite = SUITES["extrapolation"]
    row = {"length": 64, "protocol": "blocks", "reason": None} | dict.fromkeys(suite.values, 1.0)
    rows = {"rope": [row, row | {"nll": None, "reason": "too long"}], "t5": [row | {"nll": 2.0}, row]}
    table = tables.gather(suite, rows, {"rope": {}, "t5": {}})
    assert table[0]["nll_mean"] is None and table[0]["reasons"] == {"nll": "too long"}
    assert table[1]["nll_mean"] == 1.5 and table[1]["nll_standard_deviation"] == 0.5**0.5
    text = tables.markdown(table, ["nll"])
    for said in ("| rope | 0 | undefined |", "| t5 | 2 | 1.5000 ± 0.7071 |", "undefined: too long"):
        assert said in text
