"""Relations between words of the English stories, in bytes and in tokens."""

import numpy as np
import pytest

from mini_gpt.data import tokenizers
from mini_gpt.insight.heads import inputs
from mini_gpt.insight.heads.english_stories import relations
from mini_gpt.runtime.errors import UserError

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
    }
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
