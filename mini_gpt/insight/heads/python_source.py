"""Relations between parts of Python source, found with Python's own tokenizer and parser."""

import ast
import bisect
import collections
import io
import itertools
import keyword
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mini_gpt.insight.heads.kinds import OF_PYTHON
from mini_gpt.runtime.errors import UserError, first_line

KINDS = tuple(OF_PYTHON)
OPENING = {")": "(", "]": "[", "}": "{"}

Span = tuple[int, int]  # half-open, in UTF-8 bytes of the text
Word = tuple[str, Span]  # a name, a keyword or an operator
Found = Iterator[tuple[str, int, list[Span]]]  # kind, query and sorted spans; spans after the query are ignored


class Relation(NamedTuple):
    """A relation from the last byte of a query to the bytes of its keys."""

    kind: str
    query: int
    keys: tuple[Span, ...]


def relations(text: str, reach: int) -> list[Relation]:
    """Return the relations of a source file with keys at most `reach` bytes back.

    Raises UserError if the text is not Python source.

    matching bracket: from a closing bracket to its opening one. earlier use of a name: from the end of an identifier to
    all its earlier occurrences. definition of a call: from the end of the called name, in `name(...)` or
    `self.name(...)`, to that name in earlier definitions of the file or of the class.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline=None).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise UserError(f"text: not Python source ({first_line(error)})") from None
    lines = io.StringIO(text, newline=None).readlines()  # with universal newlines, as in Python's tokenizer
    starts = [0, *itertools.accumulate(len(line.encode()) for line in io.StringIO(text, newline="").readlines())]

    def words(kind: int) -> Iterator[Word]:
        for token in tokens:
            if token.type == kind:
                line, column = token.start  # in characters
                begin = starts[line - 1] + len(lines[line - 1][:column].encode())
                yield token.string, (begin, begin + len(token.string.encode()))

    names, found = list(words(tokenize.NAME)), []
    parts = (_brackets(words(tokenize.OP)), _earlier_uses(names), _calls(tree, names, starts))
    for kind, query, keys in itertools.chain(*parts):
        near = keys[bisect.bisect_left(keys, (query - reach, 0)) : bisect.bisect_left(keys, (query, 0))]
        if near:
            found.append(Relation(kind, query, tuple(near)))
    return found


def _brackets(operators: Iterable[Word]) -> Found:
    opened = []
    for text, span in operators:
        if text in OPENING.values():
            opened.append(span)
        elif text in OPENING:
            yield "matching bracket", span[1] - 1, [opened.pop()]


def _earlier_uses(names: list[Word]) -> Found:
    uses: dict[str, list[Span]] = collections.defaultdict(list)
    for text, span in names:
        if not keyword.iskeyword(text):
            yield "earlier use of a name", span[1] - 1, uses[text]  # the caller reads the list before it grows
            uses[text].append(span)


def _calls(tree: ast.Module, names: list[Word], starts: list[int]) -> Found:
    """Yield calls of functions and classes, and of a class's own methods. starts: the offset of each line."""
    begins = [span[0] for _, span in names]
    # Python 3.11 has no tokens inside f-strings, and its parser may report wrong positions there.
    ends = {span[1]: text for text, span in names}
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = {method for node in classes for method in node.body if not isinstance(method, ast.ClassDef)}
    # (nodes with calls, nodes with definitions, a function that returns the called name)
    scopes: list[tuple[Iterable[ast.AST], Iterable[ast.AST], Callable[[ast.expr], str | None]]]
    scopes = [(nodes, [node for node in nodes if node not in methods], _name)]
    scopes += [(_nodes_of_class(node), node.body, _attribute_of_self) for node in classes]
    for calling, defining, name_of in scopes:
        defined: dict[str, list[Span]] = collections.defaultdict(list)
        for node in defining:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                after_first_word = bisect.bisect(begins, starts[node.lineno - 1] + node.col_offset)
                after_keywords = after_first_word + isinstance(node, ast.AsyncFunctionDef)  # `async def` is two words
                bisect.insort(defined[node.name], names[after_keywords][1])
        for node in calling:
            if isinstance(node, ast.Call) and (name := name_of(node.func)) in defined:
                end = starts[(node.func.end_lineno or 0) - 1] + (node.func.end_col_offset or 0)
                if ends.get(end) == name:
                    yield "definition of a call", end - 1, defined[name]


def _nodes_of_class(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a class without those of nested classes, which have another `self`."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield child
            yield from _nodes_of_class(child)


def _name(called: ast.expr) -> str | None:
    return called.id if isinstance(called, ast.Name) else None


def _attribute_of_self(called: ast.expr) -> str | None:
    return called.attr if isinstance(called, ast.Attribute) and _name(called.value) == "self" else None
