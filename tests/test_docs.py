"""The docs: links, named files and fields, extension guides, cited intervals, and the example of the README."""

import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest

from docs import hooks
from mini_gpt.config import loading
from mini_gpt.training import loop
from tests.conftest import REPOSITORY

# The docs: links, named files and config fields, and the extension guides, applied to a copy of the code.

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGES_AND_README = [*PAGES, REPOSITORY / "README.md", *(REPOSITORY / name for name in ("AGENTS.md", "CONTRIBUTING.md"))]
SCRIPTS = ("benchmarks", "docs", "mini_gpt", "tests")
GUIDES = ("encoding", "objective", "source", "task", "suite", "metric", "config_field")
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"\n]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@functools.cache
def prose(path: Path) -> str:
    """Return the text without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings, as Python-Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES_AND_README, ids=relative)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{relative(page)}: {target}"
        assert not anchor or anchor in anchors(path), f"{relative(page)}: {target}"


def test_every_page_is_in_the_navigation_once():
    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", settings, re.MULTILINE)
    made = [
        "index.md",
        *(f"reference/api/{name}.md" for name in hooks.PACKAGES),
        *(str(path.relative_to(DOCS).with_suffix(".md")) for path in DOCS.rglob("*.ipynb")),
    ]
    assert sorted([*named, "experiments.md"]) == sorted([*made, *(str(page.relative_to(DOCS)) for page in PAGES)])


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_each_page_is_whole_without_a_build(page):
    """A code host shows the files as they are: no part of a page is only a mark that a build replaces."""
    text = page.read_text(encoding="utf-8")
    kinds = re.findall(r"<!-- (help|study)\b", text)
    assert kinds == re.findall(r"<!-- (?:help|study)\b.*?-->\s*[^<\s][^\0]*?<!-- /(help|study) -->", text)
    words = re.sub(r"<!--(?s:.*?)-->|^#.*$", "", text, flags=re.MULTILINE).split()
    assert len(words) >= 50


@pytest.mark.parametrize("page", PAGES_AND_README, ids=relative)
def test_named_files_and_modules_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b(?:mini_gpt|tests|docs|configs|benchmarks)/[\w/]*\w\.(?:py|md|csv)\b", text)
    named += re.findall(r"(?:^|\s)(?:python )(\w+\.py)\b", text)
    for name in named:
        made = any(f'title="{name}"' in guide.read_text(encoding="utf-8") for guide in (DOCS / "extend").glob("*.md"))
        assert (REPOSITORY / name).exists() or made, f"{relative(page)}: {name}"
    for module in re.findall(r"-m ((?:mini_gpt|docs|benchmarks|tests)[\w.]*\w)", text):
        path = REPOSITORY / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{relative(page)}: {module}"


@pytest.mark.parametrize("page", [page for page in PAGES_AND_README if page.parent.name != "api"], ids=relative)
def test_named_config_fields_exist(page):
    text = page.read_text(encoding="utf-8")
    added = re.findall(r"^\+    (\w+): ", text, re.MULTILINE)  # the guide to config fields adds these
    named = re.findall(r"--config\.([a-z][\w.]*)[ =]", text)
    named += re.findall(r"--vary ([a-z][\w.]*)=", text)
    named += re.findall(r"`((?:model|data|train|optimizer|eval|checkpoint|mesh)\.[a-z][\w.]*)(?:=[^`]*)?`", text)
    for name in named:
        if name.rpartition(".")[2] not in added and not re.search(r"\.(py|md|json|tokens|bin)$", name):
            loading.check_field(name)


SEARCHED = (
    *("Flash Attention", "multi-query", "grouped-query", "mixed precision", "KV cache", "gradient accumulation"),
    *("wandb", "Colab", "Slurm", "TPU pod", "warm-up", "BERT", "perplexity", "nanoGPT"),
)


def test_the_words_that_people_search_for_are_in_the_guides():
    pages = [REPOSITORY / "README.md", *DOCS.glob("*.md"), *(DOCS / "guides").glob("*.md"), DOCS / "try_it.ipynb"]
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages if page.stem != "experiments")
    assert [word for word in SEARCHED if word.lower() not in text.lower()] == []


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=relative)
def test_each_guide_opens_with_a_command_or_a_program(page):
    opening = page.read_text(encoding="utf-8").split("\n## ")[0]
    assert re.search(r"^```(bash|python)$", opening, re.MULTILINE)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Return a copy of the code with the changes and the checks of the extension guides."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("mini_gpt", "configs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for guide in GUIDES:
        blocks = [match.groups()[1:] for match in FENCE.finditer((DOCS / "extend" / f"{guide}.md").read_text("utf-8"))]
        for number, (language, title, code) in enumerate(blocks):
            if title and language == "diff":
                change(root / title, code)
            elif title:
                following = itertools.chain(blocks[number + 1 :], [("diff", title, None)])
                insert(root / title, code, before=next(c for kind, t, c in following if kind == "diff" and t == title))
        checks = [code for language, title, code in blocks if language == "python" and not title]
        assert checks
        (root / f"check_{guide}.py").write_text("".join(checks), encoding="utf-8")
    return root


def change(path: Path, diff: str) -> None:
    """Apply a diff: lines that begin with a space, - or +, or are empty. The file must contain the old lines once."""
    lines = [line if line.strip() else f" {line}" for line in diff.splitlines(keepends=True)]
    old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} must contain this exactly once:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def insert(path: Path, code: str, *, before: str | None) -> None:
    """Write a new file, or insert code before the top-level statement that the diff `before` changes; None: append."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text or before is None:
        path.write_text(f"{text}\n\n{code}" if text else code, encoding="utf-8")
        return
    place = text.index("".join(line[1:] for line in before.splitlines(keepends=True) if line[0] in " -"))
    start = max(match.start() for match in re.finditer(r"^\w", text, re.MULTILINE) if match.start() <= place)
    path.write_text(f"{text[:start]}{code}\n\n{text[start:]}", encoding="utf-8")


def test_the_changes_of_the_extension_guides_apply(extended):
    assert list(extended.glob("check_*.py"))


@pytest.mark.slow
def test_the_extension_guides_work(extended):
    script = "; ".join(f"exec(open('check_{guide}.py').read(), {{}})" for guide in GUIDES)
    environment = os.environ | {"PYTHONPATH": str(extended), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    done = subprocess.run([sys.executable, "-c", script], cwd=extended, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_programs_of_observe_and_edit_agree(trained):
    """Maps by hand and by `layers`, both kinds of edits, and a patch of all places with the clean text."""
    text = (DOCS / "guides" / "observe_and_edit.md").read_text(encoding="utf-8")
    code = "".join(code for _, language, _, code in FENCE.findall(text) if language == "python")
    space = {}
    exec(code.replace('"runs/tiny"', repr(str(trained(model__num_layers=2, model__position="alibi")))), space)
    tokens_BL, model = space["tokens_BL"], space["run"].model
    np.testing.assert_allclose(space["weights_BHLS"], space["weights_NBHLS"][1], atol=1e-6)
    assert np.abs(space["weights_NBHLS"][0] - space["weights_NBHLS"][1]).max() > 1e-3
    np.testing.assert_allclose(space["logits_BLV"], model(tokens_BL), atol=1e-5)
    np.testing.assert_allclose(space["without_head"](tokens_BL), space["module"](tokens_BL), atol=1e-5)
    assert np.abs(space["module"](tokens_BL) - model(tokens_BL)).max() > 1e-3 and len(space["compilations"]) == 1
    clean, corrupted = model(space["clean_BL"]), model(space["corrupted_BL"])
    np.testing.assert_allclose(space["everywhere_BLV"], clean, atol=1e-5)
    assert np.abs(clean - corrupted).max() > 1e-3


def test_help_keeps_the_lines_of_descriptions_with_commands():
    described = {}
    for path in itertools.chain.from_iterable((REPOSITORY / name).rglob("*.py") for name in SCRIPTS):
        source = path.read_text(encoding="utf-8")
        calls = re.findall(r"ArgumentParser\(.*description=__doc__.*\)", source)
        if calls and "\n\n" in (ast.get_docstring(ast.parse(source)) or ""):
            described[relative(path)] = calls
    assert {"docs/figures/shakespeare.py", "benchmarks/nanogpt_step.py"} <= described.keys()
    assert [path for path, calls in described.items() if "RawDescriptionHelpFormatter" not in calls[0]] == []


# Sentences of the docs agree with the intervals that they cite.

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
INTERVAL = re.compile(rf"\(([+−-]?{NUMBER}) to ([+−-]?{NUMBER})\)")
BOUND = re.compile(rf"\b(more|less) than ({NUMBER})(?!\w)")
SIZE = re.compile(rf"\b(?:better|worse|lower|higher|above|below|rises|raises|falls|lowers)\b[^.]{{0,20}} by ({NUMBER})")
SMALLEST = re.compile(r"\bless than the smallest effect\b")
UNDECIDED = re.compile(r"\(undecided, [+−]")  # as docs/figures/study_tables.py writes it
DECIDED = re.compile(r"\b(?:better|worse|lower|higher|more|less) than |\b(?:raises|lowers) the\b")
COMPARED = re.compile(rf"\bby (?:more|less) than {NUMBER}|\b(?:more|less) than {NUMBER} (?:below|above|lower|higher)\b")


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


def sentences(text):
    """Return the sentences outside tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = ["" if re.match(r"\s*[|#]", line) else line for line in text.splitlines()]
    blocks = re.split(r"\n\s*\n|\n(?=\s*- )", "\n".join(lines))
    return [one for block in blocks for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", " ".join(block.split())) if one]


def wrong_words(sentence):
    """Return the words of a sentence that the intervals in it do not support: each must hold for each interval."""
    intervals = [(number(low), number(high)) for low, high in INTERVAL.findall(sentence)]
    wrong = []
    for low, high in intervals:
        largest, smallest = max(abs(low), abs(high)), 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        for found in BOUND.finditer(sentence):
            limit = number(found[2])
            wrong += [found[0]] if (smallest <= limit if found[1] == "more" else largest >= limit) else []
        wrong += [found[0] for found in SIZE.finditer(sentence) if not smallest <= number(found[1]) <= largest]
    if intervals and SMALLEST.search(sentence) and "equivalent" not in sentence:
        wrong.append("less than the smallest effect")
    if UNDECIDED.search(sentence) and "claim" not in sentence:
        wrong += DECIDED.findall(sentence)
    return wrong


@pytest.mark.parametrize(
    "sentence, wrong",
    [
        ("A (shown, −0.026 (−0.037 to −0.016)) is more than 0.02 below B.", ["more than 0.02"]),
        ("A is more than 0.02 below B: −0.038 (−0.053 to −0.023).", []),
        ("A and B, −0.03 (−0.05 to −0.03) and +0.03 (+0.01 to +0.05), differ by more than 0.02.", ["more than 0.02"]),
        ("A differs by less than 0.02, +0.010 (+0.005 to +0.016).", []),
        ("A differs by less than 0.02, −0.010 (−0.022 to −0.002).", ["less than 0.02"]),
        ("A differs by more than 0.001, +0.008 (−0.002 to +0.017).", ["more than 0.001"]),
        ("A is better by 0.03, −0.030 (−0.05 to −0.02).", []),
        ("A is better than B by 0.3, −0.030 (−0.05 to −0.02).", ["better than B by 0.3"]),
        ("A is less than the smallest effect off, −0.01 (−0.02 to −0.01).", ["less than the smallest effect"]),
        ("A is less than the smallest effect from B (equivalent, −0.001 (−0.008 to +0.006)).", []),
        ("A is better than B (undecided, −0.084 (−0.162 to −0.007)).", ["better than "]),
        ("A against B is undecided (undecided, −0.084 (−0.162 to −0.007)).", []),
        ("A takes less than 0.7 of the time, 0.62 (0.61 to 0.63).", []),
        ("A has more than 2,000 tokens.", []),
    ],
)  # fmt: skip
def test_a_word_that_the_interval_does_not_support_is_found(sentence, wrong):
    assert wrong_words(sentence) == wrong


@pytest.mark.parametrize("page", PAGES_AND_README, ids=relative)
def test_words_agree_with_the_intervals_beside_them(page):
    found = {sentence: wrong for sentence in sentences(prose(page)) if (wrong := wrong_words(sentence))}
    assert not found


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("results/*.md")), ids=relative)
def test_a_bound_on_a_found_difference_cites_its_interval(page):
    for sentence in sentences(re.sub(r"^- \*\*Expected.*?(?=^- |^$)", "", prose(page), flags=re.DOTALL | re.MULTILINE)):
        if COMPARED.search(sentence) or SMALLEST.search(sentence):
            assert INTERVAL.search(sentence), sentence


# A run of the README's Python example.

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_example_runs(small, tmp_path, capsys):
    loop.train(small(train__steps=1, eval__every=1, eval__sample_tokens=0), tmp_path / "run", conclude=False)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(example.replace('"runs/tiny"', repr(str(tmp_path / "run"))).replace(":32]", ":8]"), {})
    assert capsys.readouterr().out.splitlines() == ["(128, 128)", "(1, 25, 257)", "True"]
