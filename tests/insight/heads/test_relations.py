"""Relations between words of the English stories and of Python source."""

import jax
import numpy as np
import pytest
from matplotlib import colormaps

from mini_gpt.data import english, tokenizers
from mini_gpt.insight.heads import english_stories, figure, inputs, python_source, scores, templates
from mini_gpt.insight.heads.english_stories import relations
from mini_gpt.insight.heads.python_source import KINDS
from mini_gpt.insight.observing import AttentionMaps, Layer
from mini_gpt.runtime.errors import UserError

# Relations between words of the English stories, in bytes and in tokens.

STORY = "The cats near a box see two dogs that the boy likes. He laughs. Who likes the dogs? The boy."


def found(text, reach=1000):
    data = text.encode()
    return {
        (each.kind, data[: each.query + 1].decode().split()[-1], *(data[a:b].decode() for a, b in each.keys))
        for each in relations(text, reach)
    }


def test_keys_are_the_words_that_a_reader_would_name():
    assert found(STORY) >= {
        ("subject of the verb", "see", "cats"),
        ("subject of the next verb", "box", "cats"),
        ("verb of the object", "dogs", "see"),
        ("object of the verb", "likes", "dogs"),
        ("subject of the verb", "likes", "boy"),
        ("antecedent of the pronoun", "He", "boy"),
        ("determiner of the noun", "cats", "The"),
        ("answer to the question", "The", "boy"),
        ("earlier animal", "boy", "dogs"),
        ("noun of the same class", "dogs", "cats"),
    }
    assert found("A big box that two men see is heavy. The king likes the woman.") >= {
        ("adjective of the noun", "box", "big"),
        ("noun of the adjective", "heavy", "box"),
        ("noun of the same class", "woman", "king"),
    }
    by_class = [pair for pair in found(STORY) if pair[0].startswith(("earlier", "noun of the same"))]
    assert not [pair for pair in by_class if pair[1] == pair[2]], "the same noun again is no other noun"
    assert not any(kind == "subject of the next verb" and query == key for kind, query, key in found(STORY))


def test_keys_are_within_reach_and_other_texts_are_refused():
    assert ("subject of the verb", "see", "cats") not in found(STORY, reach=8)
    assert ("antecedent of the pronoun", "He", "boy") in found(STORY, reach=20)
    for text, word in (("def f(x):\n    return x", "def"), ("The cats hides.", "hides")):
        with pytest.raises(UserError, match=f"^text: found '{word}' after '.*'; the grammar expects"):
            relations(text, 100)


def test_a_text_that_the_grammar_cannot_read_gives_a_warning(caplog):
    tokenizer = tokenizers.WordTokenizer.of_texts(["The cats hides.", "Two cats see a box."])
    other, story = (tokenizer.encode(text) for text in ("The cats hides.", "Two cats see a box."))
    inputs.of_text(np.array(other), tokenizer, len(other))
    (record,) = caplog.records
    reason = "not measured, since no document can be parsed (text: found 'hides' after 'The cats'; the grammar expects"
    assert reason in record.getMessage() and "subject of the verb" in record.getMessage()
    caplog.clear()
    both = np.array([*other, tokenizers.separator(tokenizer), *story])
    inputs.of_text(both, tokenizer, len(both))
    assert caplog.records == []


def test_tokens_of_all_stories_in_a_window_have_relations():
    text = "Two cats see a box. They hide."
    tokenizer = tokenizers.WordTokenizer.of_texts([text])
    story = [*tokenizer.encode(text), tokenizers.separator(tokenizer)]
    tokens = np.array(story * 3)
    related, _ = inputs.parsed_relations(tokens, tokenizer, np.array([0]), len(tokens))
    templates = related([0])
    at = [number * len(story) for number in range(3)]
    assert np.argwhere(templates["antecedent of the pronoun"][0]).tolist() == [[n + 6, n + 1] for n in at]
    assert np.argwhere(templates["verb of the object"][0]).tolist() == [[n + 4, n + 2] for n in at]
    assert "matching bracket" not in templates


def test_the_last_of_many_kinds_has_a_colour():
    kinds = {str(number): {"queries": 50, "strength": 1.0} for number in range(24)}
    row = {"layer": 0, "head": 0, "label": "23", "also": [], "kinds": kinds, "entropy": 0}
    (box,) = figure.head_figure([row], title="").axes[0].patches
    assert box.get_facecolor() == colormaps["Pastel2"](6)


def test_stories_are_recognised_in_other_tokens():
    tokenizer = tokenizers.ByteTokenizer()
    tokens = np.array(tokenizer.encode("Two cats see a box. They hide."))
    related, error = inputs.parsed_relations(tokens, tokenizer, np.array([0]), len(tokens))
    found = np.argwhere(related([0])["antecedent of the pronoun"][0])
    assert error is None and found.tolist() == [[23, key] for key in range(4, 8)]
    other, _ = inputs.parsed_relations(tokenizer.encode("f(x)"), tokenizer, np.array([0]), 4)
    assert other([0])["matching bracket"].any()


ROWS, L = 40, 60


def normalised(mask_BLS, otherwise_BLS):
    """Return even weights on the keys of a mask; queries without such a key have those of `otherwise`."""
    keys_BLS = np.where((mask_BLS & np.tri(L, dtype=bool)).any(-1, keepdims=True), mask_BLS, otherwise_BLS)
    keys_BLS = keys_BLS & np.tri(L, dtype=bool)
    return keys_BLS / keys_BLS.sum(-1, keepdims=True)


def test_content_of_nouns_and_adjectives_has_strength_one_for_its_own_head_only():
    """Heads that know less are at chance: the distance, the part of speech, the class of the key, the same word."""
    texts = [english.write(seed).text for seed in range(ROWS * 3)]
    tokenizer = tokenizers.WordTokenizer.of_texts(texts)
    encoded = [[*tokenizer.encode(text), tokenizers.separator(tokenizer)] for text in texts]
    tokens = np.concatenate(encoded)[: ROWS * L]
    texts = inputs.of_text(tokens, tokenizer, L)
    found = texts.relations(range(ROWS))
    same_word = texts.tokens_BL[:, :, None] == texts.tokens_BL[:, None]
    first, previous = np.arange(L) == np.zeros((ROWS, L, 1)), np.eye(L, k=-1, dtype=bool) | np.zeros((ROWS, L, 1), bool)
    nouns = found["earlier person"] | found["earlier animal"] | found["earlier thing"]
    narrow = ("adjective of the noun", "noun of the same class", "noun of the adjective")
    heads = {kind: normalised(found[kind], first) for kind in narrow} | {
        "uniform": normalised(first | True, first),
        "previous": normalised(previous, first),
        "first": normalised(first, first),
        "same word": normalised(same_word & ~np.eye(L, dtype=bool), first),
        "nouns": normalised(nouns, first),
        "persons": normalised(found["earlier person"], first),
    }
    weights_BHLS = np.stack(list(heads.values()), axis=1).astype(np.float32)
    layer = Layer(AttentionMaps(weights_BHLS * 0, weights_BHLS, np.tri(L, dtype=bool)[None]), *[None] * 6)
    stacked = np.stack(list(found.values()), axis=1)
    sums, _ = jax.jit(scores.measure)(layer, stacked, np.ones((ROWS, L), bool), english_stories.wider(found))
    sums = scores.HeadSums(*map(np.asarray, sums))
    values = [scores.of_kinds(tuple(found), sums, head) for head in range(len(heads))]
    strengths = {name: {kind: of[kind]["strength"] for kind in narrow} for name, of in zip(heads, values, strict=True)}
    for name, of_head in strengths.items():
        for kind, strength in of_head.items():
            assert strength == pytest.approx(1, abs=1e-4) if kind == name else strength < 0.1, (name, kind, strength)
    assert all(abs(strength) < 1e-5 for strength in strengths["uniform"].values())
    even = values[list(heads).index("uniform")]["noun of the same class"]
    assert even["queries"] > templates.LOCAL * ROWS and even["score"] > 0.03


# Relations in Python source (matching brackets, uses of a name, definitions of a call) are found.

PYTHON = """class Größe:
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


def found_in_source(text, kind, reach=10_000):
    """Return (line, text of the line up to the query, texts of the keys) for each relation."""
    data = text.encode()
    listed = []
    for relation in python_source.relations(text, reach):
        if relation.kind == kind:
            line = data[: relation.query].count(b"\n")
            keys = [data[start:end].decode() for start, end in relation.keys]
            listed.append((line, data[: relation.query + 1].split(b"\n")[-1].decode().strip(), keys))
    return listed


def test_brackets_are_matched():
    closing = found_in_source(PYTHON, KINDS[0])
    assert (2, "return helper(x, [x]", ["["]) in closing and (2, "return helper(x, [x])", ["("]) in closing
    assert len(closing) == sum(PYTHON.count(c) for c in ")]") - 0 and all(
        keys in (["("], ["["]) for *_, keys in closing
    )
    data = PYTHON.encode()
    nested = next(
        r
        for r in python_source.relations(PYTHON, 10_000)
        if r.kind == KINDS[0] and data[: r.query + 1].endswith(b"[x])")
    )
    assert nested.keys[0][0] == data.index(b"helper(x") + 6


def test_names_have_their_earlier_uses():
    names = found_in_source(PYTHON, KINDS[1])
    assert (2, "return helper(x", ["x"]) in names and (2, "return helper(x, [x", ["x", "x"]) in names
    assert (11, "def helper", ["helper"]) in names and all("helper (a" not in text for _, text, _ in names)
    assert not any(text.endswith(("return", "def")) for _, text, _ in names), "no keywords"


def test_calls_have_their_definitions():
    assert sorted(found_in_source(PYTHON, KINDS[2])) == [
        (5, "return (self.wert", ["wert"]),
        (11, "def helper(a, b): return helper", ["helper"]),
        (14, "open", ["open"]),
    ]


def test_distant_keys_have_no_relations_and_invalid_source_is_refused():
    near = python_source.relations("a = 1\nb = a\n" + "#" * 100 + "\na", 50)
    assert [(r.kind, r.query, r.keys) for r in near] == [(KINDS[1], 10, ((0, 1),))]
    for text in ("To be, or not to be: that", "def f(:", "\0", "(" * 300 + ")" * 300, "﻿x = x"):
        with pytest.raises(UserError, match=r"^text: not Python source \(.+\)$"):
            python_source.relations(text, 1000)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_offsets_are_bytes_for_all_line_ends(end):
    text = f'größe = "ä"{end}x = (größe,{end}  größe)\x0c{end}'
    data = text.encode()
    for relation in python_source.relations(text, 1000):
        meant = [data[start:end].decode() for start, end in relation.keys]
        assert meant == ["("] if relation.kind == KINDS[0] else set(meant) == {"größe"}, relation
        assert data[relation.query : relation.query + 1] in (b")", b"e")
    assert [r.kind for r in python_source.relations(text, 1000)].count(KINDS[1]) == 2


@pytest.mark.slow
def test_many_uses_of_a_name_have_only_near_keys():
    text = "x = x\n" * 20_000
    assert len(python_source.relations(text, 30)) == 39_999
    assert max(len(relation.keys) for relation in python_source.relations(text, 30)) <= 11


def test_every_kind_of_relation_occurs():
    assert {relation.kind for relation in python_source.relations(PYTHON, 10_000)} == set(python_source.KINDS)
