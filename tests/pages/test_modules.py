"""Each file of a page imports the names that it uses, from the file that has them."""

import re

import pytest

from mini_gpt.pages import document
from mini_gpt.pages.explorer import page as explorer

PAGES = explorer.PAGE.parents[1]
MODULES = sorted({*PAGES.rglob("*.js")} - {*PAGES.rglob("vendor/*.js")})
ENTRIES = ("explorer/page.js", "lab/page.js", "play/view/page.js", "play/engine/worker.js")
IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', re.MULTILINE)
DEFINITION = r"(?:const|let|class|(?:async )?function\*?) (\w+|\{[^}]*\})"
EXPORT, TOP = (re.compile(f"^{start}{DEFINITION}", re.MULTILINE) for start in ("export ", "(?:export )?"))


def names(listed):
    return set(re.findall(r"\w+", listed))


def exported(path, pattern=EXPORT):
    return {name for found in pattern.findall(path.read_text(encoding="utf-8")) for name in names(found)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PAGES)))
def test_imported_names_are_there_and_used(path):
    body = document.without_imports(path)
    for listed, other in IMPORT.findall(path.read_text(encoding="utf-8")):
        assert names(listed) <= exported(path.parent / other)
        assert names(listed) <= names(body)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_name_is_in_one_file_of_a_page(entry):
    """All files of a page share one scope, so that also names that are not exported must differ."""
    found = [(name, path) for path in document.modules(PAGES / entry) for name in exported(path, TOP)]
    assert len(found) == len(dict(found)), [name for name, path in found if dict(found)[name] != path]


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_module_imports_comes_before_it(entry):
    before = set()
    for path in document.modules(PAGES / entry):
        before.add(path)
        imported = document.IMPORT.findall(path.read_text(encoding="utf-8"))
        assert {(path.parent / name).resolve() for name in imported} <= before, "two modules import each other"


def test_every_file_belongs_to_a_page():
    found = {path for entry in ENTRIES for path in document.modules(PAGES / entry)}
    assert found == {*MODULES, *PAGES.rglob("vendor/*.js")}
