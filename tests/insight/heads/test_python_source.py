"""Relations in Python source (matching brackets, uses of a name, definitions of a call) are found."""

import pytest

from mini_gpt.insight.heads import python_source
from mini_gpt.insight.heads.python_source import KINDS, relations
from mini_gpt.runtime.errors import UserError

SOURCE = """class Größe:
    def wert(self, x):
        return helper(x, [x])

    async  def two(self):
        return (self.wert(1), self.two)

    class Inner:
        def other(self):
            return self.wert(2)  # not its own

def helper(a, b): return helper(b, len(a))  # helper (a
print("(", open)
def open(): ...
open("x")
"""


def found(text, kind, reach=10_000):
    """Return (line, text of the line up to the query, texts of the keys) for each relation."""
    data = text.encode()
    listed = []
    for relation in relations(text, reach):
        if relation.kind == kind:
            line = data[: relation.query].count(b"\n")
            keys = [data[start:end].decode() for start, end in relation.keys]
            listed.append((line, data[: relation.query + 1].split(b"\n")[-1].decode().strip(), keys))
    return listed


def test_brackets_are_matched():
    closing = found(SOURCE, KINDS[0])
    assert (2, "return helper(x, [x]", ["["]) in closing and (2, "return helper(x, [x])", ["("]) in closing
    assert len(closing) == sum(SOURCE.count(c) for c in ")]") - 0 and all(
        keys in (["("], ["["]) for *_, keys in closing
    )
    data = SOURCE.encode()
    nested = next(r for r in relations(SOURCE, 10_000) if r.kind == KINDS[0] and data[: r.query + 1].endswith(b"[x])"))
    assert nested.keys[0][0] == data.index(b"helper(x") + 6


def test_names_have_their_earlier_uses():
    names = found(SOURCE, KINDS[1])
    assert (2, "return helper(x", ["x"]) in names and (2, "return helper(x, [x", ["x", "x"]) in names
    assert (11, "def helper", ["helper"]) in names and all("helper (a" not in text for _, text, _ in names)
    assert not any(text.endswith(("return", "def")) for _, text, _ in names), "no keywords"


def test_calls_have_their_definitions():
    assert sorted(found(SOURCE, KINDS[2])) == [
        (5, "return (self.wert", ["wert"]),
        (11, "def helper(a, b): return helper", ["helper"]),
        (14, "open", ["open"]),
    ]


def test_distant_keys_have_no_relations_and_invalid_source_is_refused():
    near = relations("a = 1\nb = a\n" + "#" * 100 + "\na", 50)
    assert [(r.kind, r.query, r.keys) for r in near] == [(KINDS[1], 10, ((0, 1),))]
    for text in ("To be, or not to be: that", "def f(:", "\0", "(" * 300 + ")" * 300, "﻿x = x"):
        with pytest.raises(UserError, match=r"^text: not Python source \(.+\)$"):
            relations(text, 1000)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_offsets_are_bytes_for_all_line_ends(end):
    text = f'größe = "ä"{end}x = (größe,{end}  größe)\x0c{end}'
    data = text.encode()
    for relation in relations(text, 1000):
        meant = [data[start:end].decode() for start, end in relation.keys]
        assert meant == ["("] if relation.kind == KINDS[0] else set(meant) == {"größe"}, relation
        assert data[relation.query : relation.query + 1] in (b")", b"e")
    assert [r.kind for r in relations(text, 1000)].count(KINDS[1]) == 2


@pytest.mark.slow
def test_many_uses_of_a_name_have_only_near_keys():
    text = "x = x\n" * 20_000
    assert len(relations(text, 30)) == 39_999
    assert max(len(relation.keys) for relation in relations(text, 30)) <= 11


def test_every_kind_of_relation_occurs():
    assert {relation.kind for relation in relations(SOURCE, 10_000)} == set(python_source.KINDS)
