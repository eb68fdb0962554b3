"""The documented classes and functions of a module as Markdown: signatures and docstrings, from its source."""

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100  # characters of a signature on one line
MARKUP = re.compile(r"(`[^`]*`)|[*<]|(?<!\w)_|_(?!\w)|^[-+#>](?= )", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def package(folder: Path) -> str:
    """Return a page for a package, with a section for each of its modules."""
    root = folder.parent.parent
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = [path.relative_to(root) for path in sorted(folder.rglob("*.py")) if not path.stem.startswith("_")]
    sections = [markdown(root / path, ".".join(path.with_suffix("").parts)) for path in modules]
    return "\n\n".join([f"# {folder.name}", described, *sections])


def markdown(path: Path, name: str) -> str:
    """Return a section for a module, with its public classes, functions and methods that have docstrings.

    name: of the module, such as mini_gpt.model.gpt.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    return "\n\n".join([f"## `{name}`", *_docstring(tree), *_members(tree.body, source.splitlines(), ())])


def _members(body: list[ast.stmt], lines: list[str], outer: tuple[str, ...]) -> Iterator[str]:
    """Yield the paragraphs of classes and functions. outer: the names of the classes around them."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or re.match("_[^_]", node.name) or not ast.get_docstring(node):
            continue
        yield f"{'#' * (3 + len(outer))} `{'.'.join([*outer, node.name])}`"
        is_class = isinstance(node, ast.ClassDef)
        fields = list(_fields(node, lines)) if is_class else []
        code = "\n".join([_signature(node, lines) + (":" if fields else ""), *fields])
        yield f"```python\n{code}\n```"
        yield from _docstring(node)
        if is_class:
            yield from _members(node.body, lines, (*outer, node.name))


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yield the code of the fields and of the constructor's signature."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            yield from lines[part.lineno - 1 : part.end_lineno]
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            yield from (f"    {line}" for line in _signature(part, lines).splitlines())


def _signature(node: Function | ast.ClassDef, lines: list[str]) -> str:
    """Return the decorators, the name and the arguments: all on one line, or one on each line if that is too long."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    decorators = textwrap.dedent("\n".join(lines[first - 1 : node.lineno - 1])).splitlines()
    head = [re.sub(r"\s*#.*", "", line).strip() for line in lines[node.lineno - 1 : node.body[0].lineno - 1]]
    line = " ".join(filter(None, head)).removesuffix(":").replace("( ", "(").replace(", )", ")").replace(" )", ")")
    if len(line) > WIDTH:
        start, _, rest = line.partition("(")
        arguments, _, result = rest.rpartition(")")
        each = re.split(r", (?=\*|\w+: )", arguments)
        line = "\n".join([f"{start}(", *(f"    {argument}," for argument in each), f"){result}"])
    return "\n".join([*decorators, line])


def _docstring(node: ast.Module | Function | ast.ClassDef) -> Iterator[str]:
    """Yield the paragraphs of a docstring. The lines of arguments and fields become a list, and indented lines code."""
    names = set(described_names(node))
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        for kind, lines in itertools.groupby(_lines(paragraph, names), key=lambda line: line[0]):
            text = "\n".join(text for _, text in lines)
            yield f"```text\n{text}\n```" if kind == "code" else text


def _lines(paragraph: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the kind of each line (text, list or code) and its Markdown."""
    kind = "text"
    for line in paragraph.splitlines():
        described = re.match(r"(\w+(?:, \w+)*): ", line)
        if described and names.issuperset(found := described[1].split(", ")):
            kind = "list"
            yield kind, f"- {', '.join(f'`{name}`' for name in found)}: {_escaped(line[described.end() :])}"
        elif line.startswith("    "):
            kind = "code"
            yield kind, line[4:]
        elif kind == "list" and not line.startswith("Raises "):
            yield kind, f"  {_escaped(line.strip())}"
        else:
            kind = "text"
            yield kind, _escaped(line)


def described_names(node: ast.AST) -> Iterator[str]:
    """Yield the parameters of a function, or the fields of a class and the parameters of its constructor."""
    if isinstance(node, Function):
        yield from (argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg))
    for part in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(part, ast.AnnAssign):
            yield ast.unparse(part.target)
        elif isinstance(part, Function) and part.name == "__init__":
            yield from described_names(part)


def _escaped(text: str) -> str:
    """Escape what Markdown would not show as it is; `<` in the way that Python-Markdown also reads."""
    return MARKUP.sub(lambda found: found[1] or ("&lt;" if found[0] == "<" else f"\\{found[0]}"), text)
