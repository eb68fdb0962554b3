"""The numbers of studies in the docs are those of the CSV files that the studies wrote."""

import csv
import json

import pytest

from docs.figures import study_tables
from mini_gpt.study import statistics
from tests.conftest import REPOSITORY


def test_every_page_has_the_numbers_of_its_studies():
    for page in (REPOSITORY / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert study_tables.write_page(text) == text, f"{page}: run python -m docs.figures.study_tables"


def test_the_verdicts_of_the_docs_follow_from_their_numbers():
    with (study_tables.DOCS / "studies" / "comparisons.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["study"] for row in rows}) > 20
    for row in rows:
        differences_S = [float(one) for one in row["differences"].split()]
        assert statistics.sign_flip_p(differences_S) == pytest.approx(float(row["p"]))
        p, equivalent_p = float(row["p_holm"]), float(row["p_equivalent_holm"])
        expected = statistics.verdict(float(row["difference"]), row["claim"], p, equivalent_p, 0.05)
        assert row["verdict"] == ("no verdict" if len(set(differences_S)) == 1 else expected), row
        excludes_0 = bool(row["interval_low"]) and float(row["interval_low"]) * float(row["interval_high"]) > 0
        assert bool(row["reason"]) == (row["verdict"] == "no verdict" or (row["verdict"] == "undecided" and excludes_0))


RULE = "|---|---|---|\n"


@pytest.fixture
def docs(tmp_path, monkeypatch):
    monkeypatch.setattr(study_tables, "DOCS", tmp_path)
    folder = tmp_path / "studies"
    folder.mkdir()

    def write(table, text):
        """Write a table with rows of the study "sizes", and the first one also for the study "new"."""
        header, first, *others = text.splitlines()
        lines = [f"study,{header}", f"new,{first}", *(f"sizes,{line}" for line in (first, *others))]
        (folder / f"{table}.csv").write_text("\n".join(lines) + "\n")

    write("standing", "standing\nConfirmatory: the plan was frozen.\n")
    write(
        "comparisons",
        "first,claim,second,suite,metric,label,length,difference,interval_low,interval_high,p_holm,seeds,verdict,reason\n"
        "a,lower,b,perplexity,nll,,64,-0.12345,-0.2,-0.05,0.0078125,8,shown,\n"
        "a,lower,b,perplexity,nll,,128,,,,1.0,0,no verdict,no seed is complete\n"
        "a,lower,c,perplexity,bits_per_byte,x,64,-0.1,,,1.0,1,no verdict,\n",
    )
    write(
        "perplexity",
        "condition,measured,length,nll_mean,nll_standard_deviation\na,,64,1.23456,0.001\na,,1024,,\nb,x,64,2.0,0.1\n"
        "c,x,32,2.5,\nc,x,64,2.438,\n",
    )
    write(
        "by_position",
        "condition,seed,length,context,nll\na,0,8,1,2.0\na,0,8,5,1.0\nb,0,8,1,2.4\nb,0,8,5,1.0\n"
        "a,1,8,1,3.0\na,1,8,5,1.5\nb,1,8,1,3.6\nb,1,8,5,1.5\na,0,16,1,9.0\n",
    )
    write(
        "seeds",
        "condition,seed,learned,suite,measured,length,nll,exact_match\n"
        "a,0,True,text,x,4,9.0,\na,0,True,text,x,8,2.0,\na,0,True,text,x,16,2.04,\na,0,True,text,x,32,2.04,\n"
        "a,0,True,text,x,64,2.06,\na,1,True,text,x,8,3.0,\na,1,True,text,x,16,2.0,\na,1,True,text,x,32,3.04,\n"
        "a,1,True,text,x,64,3.0,\na,2,True,text,x,8,3.0,\na,2,True,text,x,16,,\na,2,True,text,x,32,3.0,\n"
        "b,0,True,tasks,,8,,0.95\nb,0,True,tasks,,16,,0.9\nb,1,True,tasks,,8,,0.95\nb,1,True,tasks,,16,,0.89\n"
        "c,0,True,tasks,,8,,0.2\nc,0,True,tasks,,16,,0.95\nd,0,False,tasks,,8,,1\nd,1,True,tasks,,8,,1\n"
        "e,0,True,tasks,,8,,1\ne,0,True,tasks,,16,,1\nf,0,,tasks,,8,,1\n",
    )
    return tmp_path


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("standing", "Confirmatory: the plan was frozen."),
        ("verdict a b 64", "shown, −0.123 (−0.200 to −0.050)"),
        ("verdict a b 128", "no verdict, –"),
        ("table perplexity nll", "\n|  | 64 | 1,024 |\n|---|---|---|\n| a | 1.235 ± 0.001 | undefined |\n"),
        ("verdict a c", "no verdict, −0.100"),
        ("verdict a c 64 bits_per_byte", "no verdict, −0.100"),
        ("table perplexity nll x", f"\n|  | 32 | 64 |\n{RULE}| b | – | 2.000 ± 0.100 |\n| c | 2.500 | 2.438 |\n"),
        ("rise c 32 64 perplexity nll x", "−0.062"),
        ("rise c 64 32 perplexity nll x", "+0.062"),
        ("holds a 8 text nll x", "4× (2 of 3)"),
        ("holds b 8 tasks exact_match", "1× (2 of 2)"),
        ("holds c 8", "not learned"),
        ("holds d 8 tasks exact_match", "not learned"),
        ("holds e 8", "≥ 2× (1 of 1)"),
        ("at a b 8 1 4", "−0.500 ± 0.141"),
        ("at a b 8 1 8", "−0.250 ± 0.071"),
    ],
)
def test_a_mark_is_replaced_by_the_numbers_of_the_study(docs, kind, expected):
    page = f"Before <!-- study sizes: {kind} -->old<!-- /study --> after"
    written = study_tables.write_page(page)
    assert written == f"Before <!-- study sizes: {kind} -->{expected}<!-- /study --> after"
    assert study_tables.write_page(written) == written


def test_a_table_of_several_metrics_names_them(docs):
    page = study_tables.write_page("<!-- study sizes: verdicts --><!-- /study -->")
    assert "| a lower than c | bits_per_byte x | 64 | −0.100 | 1 | 1 | no verdict |" in page
    assert "| a lower than b | nll | 128 | – | 1 | 0 | no verdict: no seed is complete |" in page


def test_a_condition_passes_another_if_the_order_changes_in_all_seeds(docs):
    losses = {
        "earlier": {"a": (1, 2), "b": (2, 3), "c": (3, 2.5)},
        "later": {"c": (1.5, 1), "b": (2, 2), "a": (3, 1.5)},
    }
    rows = [
        f"{study},{name},{seed},extrapolation,blocks,{length},{nll + (length == 8)}\n"
        for study, of in losses.items()
        for name, of_seeds in of.items()
        for seed, nll in enumerate(of_seeds)
        for length in (4, 8)
    ]
    header = "study,condition,seed,suite,measured,length,nll\n"
    (docs / "studies" / "seeds.csv").write_text(header + "".join(rows) + "later,a,0,extrapolation,x,4,9\n")
    page = study_tables.write_page("<!-- study later: orders earlier 4 --><!-- /study -->")
    table = "| c | 2.750 (3) | 1.250 (1) | a |\n| b | 2.500 (2) | 2.000 (2) |  |\n| a | 1.500 (1) | 2.250 (3) |  |"
    assert f"|  | `earlier` | `later` | passes |\n|---|---|---|---|\n{table}\n" in page


def test_the_table_of_lengths_has_a_dash_for_what_was_not_run(docs, monkeypatch):
    monkeypatch.setattr(study_tables, "HOLDING", {"on eight": {"sizes": 8}})
    monkeypatch.setattr(study_tables, "CONDITIONS", ("e", "abacus", "c"))
    rows = "| `e` | ≥ 2× (1 of 1) |\n| `learned`, abacus ids | – |\n| `c` | not learned |"
    assert f"| encoding | on eight |\n|---|---|\n{rows}\n" in study_tables.write_page(
        "<!-- study all: holding --><!-- /study -->"
    )


@pytest.mark.parametrize(
    "kind", ["verdict a d", "verdict a b", "nothing", "table perplexity nll y", "holds z 8 text nll x"]
)
def test_a_mark_that_the_study_does_not_have_is_an_error(docs, kind):
    with pytest.raises((KeyError, ValueError)):
        study_tables.write_page(f"<!-- study sizes: {kind} --><!-- /study -->")


def test_the_results_of_a_study_are_taken(docs, tmp_path, standing="Confirmatory"):
    study = tmp_path / "run"
    study.mkdir()
    (study / "study.json").write_text('{"name": "new"}')
    (study / "report.md").write_text(f"# Which?\n\n{standing}: a sentence.\n\n## Verdicts\n")
    (study / "comparisons.csv").write_text("first,verdict\nc,shown\n")
    (study / "tasks.csv").write_text("condition,right\nc,1\n")
    for name in ("training.png", "differences-nll.png"):
        (study / name).write_text(name)
    (docs / "page.md").write_text("![The differences](studies/new/differences-nll.png)")
    columns = "condition,seed,suite,learned,measured,length,nll,perplexity"
    (study / "runs.csv").write_text(f'{columns}\n"a,b",3,extrapolation,True,blocks,8,1.234567,3.4\n')
    evaluated, left_out = study / "a,b,seed=3" / "eval", study / "a,b,seed=9" / "eval"
    evaluated.mkdir(parents=True)
    left_out.mkdir(parents=True)
    (left_out / "extrapolation.json").write_text(json.dumps({"by_position": {"8": [9.0] * 8}}))
    by_position = {"8": [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 6.0], "256": [1.0] * 256}
    (evaluated / "extrapolation.json").write_text(json.dumps({"by_position": by_position}))
    study_tables.take(study)
    assert [path.name for path in (docs / "studies" / "new").iterdir()] == ["differences-nll.png"]
    found = {path.stem: study_tables._read(path) for path in (docs / "studies").glob("*.csv")}
    of_new = {table: [row for row in rows if row["study"] == "new"] for table, rows in found.items()}
    assert [(row["seed"], row["length"], row["context"], row["nll"]) for row in of_new["by_position"]] == [
        ("3", "8", "1", "2.5"),
        ("3", "8", "5", "5.25"),
    ]
    seed = {"study": "new", "condition": "a,b", "seed": "3", "suite": "extrapolation", "learned": "True"}
    assert of_new["seeds"] == [seed | {"measured": "blocks", "length": "8", "nll": "1.23457", "exact_match": ""}]
    assert [row["standing"] for row in of_new["standing"]] == [f"{standing}: a sentence."]
    assert [(row["first"], row["verdict"]) for row in of_new["comparisons"]] == [("c", "shown")]
    assert of_new["tasks"] == [{"study": "new", "condition": "c", "right": "1"}]
    assert {table: len(found[table]) - len(of_new[table]) for table in ("standing", "comparisons", "by_position")} == {
        "standing": 1,
        "comparisons": 3,
        "by_position": 9,
    }, "the rows of the other study stay"
