"""The notebooks of the tutorials run, use public names only, and are stored with their figures."""

import ast
import itertools
import re
import time

import nbformat
import numpy as np
import pytest

from docs.tutorials import execute
from tests.conftest import REPOSITORY

NOTEBOOKS = execute.NOTEBOOKS
TRY_IT = execute.TRY_IT
TIME_LIMIT = 480  # seconds; the slowest notebook took 80 to 190 s on two cores of different machines


def name(path):
    return path.stem


def sources(path, kind):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_run_without_errors(path):
    start = time.monotonic()
    notebook = execute.execute(path)
    assert time.monotonic() - start < TIME_LIMIT
    if path.name.startswith("3"):
        check_norms_formats_and_forecasts(notebook)


@pytest.mark.slow
def test_the_notebook_for_the_first_try_runs_and_shows_the_explorer():
    notebook = execute.execute(TRY_IT)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    (shown,) = (output.data["text/html"] for output in outputs if "text/html" in output.get("data", {}))
    assert shown.startswith("<iframe srcdoc=") and "attention" in shown
    said = "".join(output.get("text", "") for output in outputs)
    assert "4 of 4 runs are complete" in said and "Verdicts: 1 undecided" in said and "\x1b" not in said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_use_public_names_only(path):
    for source in sources(path, "code"):
        tree = ast.parse(source)
        names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert not [each for each in names if each.startswith("_")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_what_notebooks_import_exists(path, monkeypatch):
    monkeypatch.syspath_prepend(execute.FOLDER)
    for source in sources(path, "code"):
        exec("\n".join(line for line in source.splitlines() if re.match(r"(from|import) ", line)), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_stored_notebooks_have_figures_with_descriptions_and_no_errors(path):
    figures = 0
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error" and output.get("name") != "stderr", cell.source
            if "image/png" in output.get("data", {}):
                figures += 1
                assert len(cell.metadata.get("alt", "")) > 30, cell.source
        if cell.cell_type == "code":
            assert cell.execution_count is not None, f"run python -m docs.tutorials.execute --only={path.name[0]}"
    assert figures >= 2


def check_norms_formats_and_forecasts(notebook):
    """BatchNorm mixes texts, float16 needs a scale, bfloat16 does not, and two faults forecast the mean."""
    said = {cell.id: "".join(one.get("text", "") for one in cell.get("outputs", ())) for cell in notebook.cells}
    changes = np.array(re.findall(r" (\d\.\d\d) +(\d\.\d\d)$", said["norms-code"], re.MULTILINE), float)
    assert len(changes) == 4 and (changes[:, 0] == 0).all() and (changes[:, 1] > 0.2).all()
    lost = np.array(re.findall(r"([\d.]+)% are 0, ([\d.]+)% are ∞", said["float16-code"]), float)
    assert lost.shape == (6, 2) and lost[0, 0] > 1 and lost[2, 1] > 0.1
    assert not lost[1].any() and not lost[3:].any()  # float16 with a scale of 2^15, and bfloat16
    (of_mean,) = map(float, re.findall(r"error of the mean: (.+)", said["flat-code"]))
    found = np.array(re.findall(r"error (\d\.\d\d), standard deviation of a forecast (.+)", said["flat-code"]), float)
    np.testing.assert_allclose(found[:2], [[of_mean, 0]] * 2, atol=0.015)
    assert len(found) == 3 and found[2, 0] < 0.2 and found[2, 1] > 0.5


def test_the_stored_numbers_of_notebook_3_show_what_its_text_says():
    check_norms_formats_and_forecasts(nbformat.read(NOTEBOOKS[2], as_version=4))


@pytest.mark.parametrize("path", [*NOTEBOOKS, TRY_IT], ids=name)
def test_links_of_notebooks_lead_to_files(path):
    for source in sources(path, "markdown"):
        for target in re.findall(r"\]\(([^)\s#]+)", source):
            assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_numbers_of_studies_are_those_of_the_corrections(path):
    measured = (REPOSITORY / "docs" / "results" / "corrections.md").read_text(encoding="utf-8")
    for source in sources(path, "markdown"):
        for number in re.findall(r"(?<![\d.])[+−]?\d\.\d{3}(?!\d)", source):
            assert number.lstrip("+−") in measured, number


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_cell_follows_what_courses_say_and_a_quiz_ends_a_notebook(path):
    cells = nbformat.read(path, as_version=4).cells
    for cell, following in itertools.pairwise(cells):
        assert "**Courses" not in cell.source or following.cell_type == "code", cell.source
    assert re.fullmatch(r'check\("quiz \d\.\d", \.\.\.\)', cells[-1].source)


def test_the_five_notebooks_are_listed_in_their_order():
    site = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    index = (REPOSITORY / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    names = [path.stem for path in NOTEBOOKS]
    assert re.findall(r": tutorials/(\d\w+)\.md$", site, re.MULTILINE) == names and len(names) == 5
    assert re.findall(r"^\| \[.+\]\((\d\w+)\.ipynb\)", index, re.MULTILINE) == names
