"""Which parts of Python source belong together, according to Python's own tokenizer and parser."""

import ast
import bisect
import collections
import io
import itertools
import keyword
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from tokenize import TokenInfo
from typing import NamedTuple

KINDS = ("matching bracket", "earlier use of a name", "definition of a call")
OPENING = {")": "(", "]": "[", "}": "{"}

Span = tuple[int, int]  # half-open, in UTF-8 bytes of the text


class Relation(NamedTuple):
    """A relation from the last byte of a query to the bytes of its keys."""

    kind: str
    query: int
    keys: tuple[Span, ...]


def relations(text: str, reach: int) -> list[Relation]:
    """Return the relations of a source file whose keys start at most `reach` bytes before the query.

    If the file does not parse, there are none. matching bracket: from a closing bracket to its opening one. earlier use
    of a name: from the end of an identifier to all its earlier occurrences. definition of a call: from the end of the
    called name, in `name(...)` or `self.name(...)`, to that name in earlier definitions of the file or of the class.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline=None).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return []
    offsets = _Offsets(text)
    found = []
    for kind, query, keys in itertools.chain(
        _brackets(tokens, offsets), _names(tokens, offsets), _calls(tree, tokens, offsets)
    ):
        near = keys[bisect.bisect_left(keys, (query - reach, 0)) : bisect.bisect_left(keys, (query, 0))]
        if near:
            found.append(Relation(kind, query, tuple(near)))
    return found


class _Offsets:
    """Converts lines and columns to byte offsets."""

    def __init__(self, text: str):
        self.lines = io.StringIO(text, newline=None).readlines()  # with universal newlines, as Python reads them
        self.starts = [0]
        for line in io.StringIO(text, newline="").readlines():
            self.starts.append(self.starts[-1] + len(line.encode()))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position of the parser, whose columns count bytes."""
        return self.starts[line - 1] + column

    def span(self, token: TokenInfo) -> Span:
        """Return the span of a token; the tokenizer's columns count characters."""
        (line, column), (last, end) = token.start, token.end
        byte = lambda number, at: self.starts[number - 1] + len(self.lines[number - 1][:at].encode())
        return byte(line, column), byte(last, end)


Found = Iterator[tuple[str, int, list[Span]]]  # kind, query and sorted spans; only spans before the query count


def _brackets(tokens: list[TokenInfo], offsets: _Offsets) -> Found:
    opened = []
    for token in tokens:
        if token.type == tokenize.OP and token.string in OPENING.values():
            opened.append(offsets.span(token))
        elif token.type == tokenize.OP and token.string in OPENING:
            yield KINDS[0], offsets.span(token)[1] - 1, [opened.pop()]


def _names(tokens: list[TokenInfo], offsets: _Offsets) -> Found:
    uses: dict[str, list[Span]] = collections.defaultdict(list)
    for token in tokens:
        if _is_identifier(token):
            span = offsets.span(token)
            yield KINDS[1], span[1] - 1, uses[token.string]  # the caller reads the list before it grows
            uses[token.string].append(span)


def _calls(tree: ast.Module, tokens: list[TokenInfo], offsets: _Offsets) -> Found:
    names = [token for token in tokens if token.type == tokenize.NAME]
    name_at = {}  # from the start of a definition to the span of its name
    for before, word, name in zip([None, *names], names, names[1:], strict=False):
        if word.string in ("def", "class"):
            start = before if before is not None and before.string == "async" else word
            name_at[offsets.span(start)[0]] = offsets.span(name)
    # Python 3.11 has no tokens inside f-strings, and its parser may report other positions there.
    ends = {offsets.span(token)[1]: token.string for token in names}

    def defined(nodes: Iterable[ast.AST]) -> dict[str, list[Span]]:
        spans = collections.defaultdict(list)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                spans[node.name].append(name_at[offsets.offset(node.lineno, node.col_offset)])
        return {name: sorted(found) for name, found in spans.items()}

    def called(
        nodes: Iterable[ast.AST], definitions: dict[str, list[Span]], name_of: Callable[[ast.expr], str | None]
    ) -> Found:
        for node in nodes:
            if isinstance(node, ast.Call) and (name := name_of(node.func)) in definitions:
                end = offsets.offset(node.func.end_lineno or 0, node.func.end_col_offset or 0)
                if ends.get(end) == name:
                    yield KINDS[2], end - 1, definitions[name]

    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = {method for node in classes for method in node.body if not isinstance(method, ast.ClassDef)}
    yield from called(nodes, defined(node for node in nodes if node not in methods), _name)
    for node in classes:
        yield from called(_nodes_of_class(node), defined(node.body), _attribute_of_self)


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


def _is_identifier(token: TokenInfo) -> bool:
    return token.type == tokenize.NAME and not keyword.iskeyword(token.string)
