"""Tasks, whose answers separate solvers compute, and the English stories, with their grammar and links."""

import calendar
import collections
import hashlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from mini_gpt.data import corpora, english, splits, task_batches, tasks, token_store, tokenizers
from mini_gpt.data.english import grammar as lexicon
from mini_gpt.data.tasks import published, reasoning
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY
from tests.data.language_solvers import GERMAN_NOUNS, GERMAN_VERBS
from tests.data.solvers import SOLVERS, UNITS, solve_addition

# Tasks: splits, batches, and answers, which separate solvers compute from the questions.

TOKENIZER = tokenizers.CharacterTokenizer(tasks.ALPHABET)


def problems(name, split, count, seed=0, **lengths):
    return [tasks.problem(f"task:{name}", split, seed, index, **lengths) for index in range(count)]


def test_every_task_has_a_solver():
    assert set(SOLVERS) == set(UNITS) == set(tasks.known())


@pytest.mark.parametrize("name", tasks.known())
def test_answers_are_right_and_lengths_in_range(name):
    task = tasks.known()[name]
    for length in (task.shortest, 7, 20, 40):
        for question, answer in problems(name, "train", 40, shortest=length, longest=length):
            assert SOLVERS[name](question) == answer
            assert UNITS[name](question) == length
            text = f"{question}=\n" if task.tags else f"{question}={answer}\n"
            assert len(text) <= task.size(length)
            assert all(
                len(text) <= size for text, size in zip((question, f"{answer}\n"), task.sizes_of(length), strict=True)
            )
            assert set(question + answer) <= set(task.alphabet) - {tasks.ANSWER, tasks.END}
            tokenizers.CharacterTokenizer(task.alphabet).encode(question + answer)


@pytest.mark.parametrize("name", tasks.known())
def test_problems_are_a_function_of_split_seed_and_index(name):
    first = max(8, tasks.known()[name].shortest)
    lengths = {"shortest": first, "longest": first + 5}
    found = problems(name, "train", 600, **lengths)
    assert found[:30] == problems(name, "train", 30, **lengths)
    assert found[:30] != problems(name, "train", 30, seed=1, **lengths)
    counts = Counter(UNITS[name](question) for question, _ in found)
    for rank, length in enumerate(range(first, first + 6), start=1):  # the larger of two uniform draws from six lengths
        assert counts[length] / 600 == pytest.approx((2 * rank - 1) / 36, abs=0.06)
    assert sum(counts.values()) == 600 and set(counts) == set(range(first, first + 6))
    assert len({answer for _, answer in found}) > 1


@pytest.mark.parametrize("name", tasks.known())
def test_splits_share_no_problem_and_have_their_fraction(name):
    task = tasks.known()[name]
    for length in (task.shortest, task.shortest + 1, 6):
        sets = [
            {question for question, _ in problems(name, split, 60, seed=seed, shortest=length, longest=length)}
            for seed, split in enumerate(("train", "validation", "test"))
        ]
        assert all(sets) and not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    rng = np.random.default_rng(0)
    shares = Counter(tasks.split_of(task.draw(rng, 20)[0]) for _ in range(2000))
    assert shares["validation"] / 2000 == pytest.approx(1 / 8, abs=0.03)
    assert shares["test"] / 2000 == pytest.approx(1 / 8, abs=0.03)


@pytest.mark.parametrize("name, scored", [("mqar", 6), ("flip_flop_dense", None), ("copy", 0)])
def test_values_within_a_question_count_if_they_follow_from_the_text_before(name, scored):
    task = tasks.known()[name]
    for question, _ in problems(name, "train", 20, shortest=7, longest=7):
        places = task.scored(question)
        assert len(places) == (question.count("r") - 1 if scored is None else scored)
        assert all(question[place] == SOLVERS[name](question[:place]) for place in places)


def test_scan_has_all_of_its_commands():
    commands = [question for group in reasoning._commands().values() for question, _ in group]
    assert len(commands) == len(set(commands)) == 20_910  # Lake and Baroni 2018
    words = "walk look run jump turn left right opposite around twice thrice and after"
    assert set(" ".join(commands).split()) == {*words.split(" ")}
    rng = np.random.default_rng(0)
    assert len(tasks.known()["scan"].draw(rng, 23)[1]) == 22, "no command has 23 actions"


def parts(name, index, length):
    """Return the aligned parts of a problem, as texts, and the problem."""
    question, answer = tasks.problem(f"task:{name}", "train", 0, index, shortest=length, longest=length)
    links = tasks.known()[name].align(question, answer)
    return [(question[slice(*a)], answer[slice(*b)]) for a, b in links], question, answer


def test_sentences_agree_and_words_are_aligned():
    found, nouns = set(), {noun: part.split() for part in GERMAN_NOUNS for noun in part.split()}
    crossing = 0
    for index in range(500):
        aligned, question, answer = parts("english_german", index, 2)
        found.add(question)
        for side, text in enumerate((question, answer)):  # each word is aligned once
            assert sorted(pair[side] for pair in aligned) == sorted(text.replace(";", "").split())
        assert [word for word, _ in aligned] == question.replace(";", "").split()
        for word, german in aligned:
            if word in nouns:
                assert german in GERMAN_NOUNS[" ".join(nouns[word])][:2]
            for words, translated in GERMAN_VERBS.items():
                assert (word in words.split()) == (german in translated.split())
        crossing += [german for _, german in aligned] != answer.replace(";", "").split()
    assert len(found) > 450 and crossing > 250, "sentences vary, and words move"


@pytest.mark.parametrize("length", [1, 3])
def test_words_and_parts_of_dates_are_aligned(length):
    for index in range(50):
        for name in ("reverse_words", "sort_words"):
            aligned, question, answer = parts(name, index, length)
            assert all(word == same for word, same in aligned) and len(aligned) == length
            assert {word for word, _ in aligned} == set(question.split()) == set(answer.split())
        aligned, *_ = parts("dates", index, length)
        assert len(aligned) == 3 * length
        for (year, year_of_iso), (month, month_of_iso), (day, day_of_iso) in zip(*[iter(aligned)] * 3, strict=True):
            assert year == year_of_iso and int(day) == int(day_of_iso)
            names = calendar.month_name[int(month_of_iso)]
            assert int(month) == int(month_of_iso) if month.isdigit() else month in (names, names[:3])


def test_sorted_words_that_are_equal_keep_their_order():
    links = tasks.known()["sort_words"].align("b a b", "a b b")
    assert links == [((2, 3), (0, 1)), ((0, 1), (2, 3)), ((4, 5), (4, 5))]


def test_different_returns_each_question_once():
    found = tasks.different("task:missing_duplicate", "validation", 512, shortest=5, longest=5)
    assert len({question for question, _ in found}) == len(found)
    every = {word * 2 for word in (f"{bits:05b}" for bits in range(32))}
    every = {text[:gap] + "_" + text[gap + 1 :] for text in every for gap in range(10)}
    assert {question for question, _ in found} == {q for q in every if tasks.split_of(q) == "validation"}
    assert len(tasks.different("task:copy", "test", 512, shortest=9, longest=9)) == 512


def test_unknown_tasks_and_lengths_are_refused():
    with pytest.raises(UserError, match=r"data\.corpus: found 'task:copi'; the tasks are copy, .*did you mean copy\?"):
        tasks.find("task:copi")
    with pytest.raises(UserError, match=r"--lengths: found 60; .* of length 2 to 52 \(pairs\)"):
        tasks.check_length("task:associative_recall", "--lengths", 60)
    with pytest.raises(UserError, match=r"--lengths: found 20000000000; task:copy has problems of length 2 to 100000"):
        tasks.check_length("task:copy", "--lengths", 20 * 10**9)
    with pytest.raises(UserError, match=r"--lengths: found 1; task:copy has problems of length 2 to 100000"):
        tasks.check_length("task:copy", "--lengths", 1)


@pytest.fixture
def config(small):
    def make(name="copy", length=6, **overrides):
        size = tasks.known()[name].size(length)
        base = {"data__corpus": f"task:{name}", "data__tokenizer": "characters", "data__task_length": length}
        return small(**(base | {"context_length": size} | overrides))

    return make


def test_only_the_answer_has_weight(config):
    train_batches = task_batches.TaskBatches(config(), TOKENIZER)
    for step in (0, 5):
        batch = train_batches[step]
        assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(batch, (8, 14))
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        for row in range(8):
            text = TOKENIZER.decode([batch["inputs"][row, 0], *batch["targets"][row]])
            question, answer = text.split("=")
            weighted = TOKENIZER.decode(batch["targets"][row][batch["weights"][row] == 1])
            assert weighted == answer == question + "\n"
            assert tasks.split_of(question) == "train" and 2 <= len(question) <= 6
    again = task_batches.TaskBatches(config(), TOKENIZER, rows=range(4, 8))[5]
    np.testing.assert_array_equal(again["inputs"], batch["inputs"][4:])
    assert len({tuple(row) for step in range(4) for row in train_batches[step]["inputs"].tolist()}) == 32


def test_a_masked_batch_masks_the_whole_answer(config):
    masked = {"train__objective": "masked", "model__causal": False, "data__isolate_documents": True}
    batch = task_batches.TaskBatches(config("reverse", **masked), TOKENIZER)[0]
    mask = len(TOKENIZER.token_bytes)
    np.testing.assert_array_equal(batch["inputs"] == mask, batch["weights"] == 1)
    shown = batch["weights"] == 0
    np.testing.assert_array_equal(batch["inputs"][shown], batch["targets"][shown])
    for row, weights in zip(batch["targets"], batch["weights"], strict=True):
        question, answer = TOKENIZER.decode(row).split("=")
        assert answer == question[::-1] + "\n" == TOKENIZER.decode(row[weights == 1])


def test_a_context_too_short_for_a_task_is_refused(config):
    with pytest.raises(
        UserError, match=r"context_length: found 12; task:copy with data\.task_length=6 needs at least 13"
    ):
        task_batches.TaskBatches(config(context_length=12), TOKENIZER)
    task_batches.TaskBatches(config(context_length=13), TOKENIZER)
    with pytest.raises(UserError, match=r"data\.task_length: found 1; task:copy has problems of length 2 to"):
        task_batches.TaskBatches(config(data__task_length=1), TOKENIZER)


def test_long_numbers_are_added_or_refused():
    most = tasks.known()["addition"].longest
    for question, answer in problems("addition", "train", 3, shortest=most, longest=most):
        assert len(question) == 2 * most + 1 and answer == solve_addition(question)
    with pytest.raises(
        UserError, match=r"^data\.task_length: found 4300; task:addition has problems of length 1 to 4299"
    ):
        tasks.check_length("task:addition", "data.task_length", most + 1)


def test_published_results_belong_to_tasks_and_name_their_protocol():
    found = {name: published.of_task(name) for name in tasks.known()}
    assert sum(map(len, found.values())) == 4 * 8 + 6 + 1 and not found["copy"]
    for row in itertools.chain(*found.values()):
        assert row.source in published.PROTOCOLS and 0 <= row.value <= 1
    assert published.of_task("majority")[3] == (
        "Huang et al. 2025",
        "nope",
        "101-150",
        "exact_match",
        0.9846,
        "5 of 16",
    )


# The English stories: their grammar, the links between their words, and the probabilities of the words.

STORIES = [english.write(seed) for seed in range(400)]
SINGULAR = {form for nouns in lexicon.NOUNS.values() for form, _ in nouns}
PLURAL = {form for nouns in lexicon.NOUNS.values() for _, form in nouns}
PERSONS = {"he": {"man", "boy", "king"}, "she": {"woman", "girl", "queen"}}
SAID_OF = {"polite": PERSONS["he"] | PERSONS["she"], "hungry": {"cat", "dog", "bird", "horse"}}
SAID_OF |= {"clever": SAID_OF["polite"], "wild": SAID_OF["hungry"], "empty": {"box", "ball", "book", "cup"}}
SAID_OF["heavy"] = SAID_OF["empty"]
STEM = {"men": "man", "women": "woman", "boxes": "box"}


def stem(noun):
    return STEM.get(noun, noun if noun in SINGULAR else noun.removesuffix("s"))


def linked(text):
    """Return {kind: [(word, other word)]} of a text."""
    story = english.read(text)
    found = collections.defaultdict(list)
    for link in story.links:
        found[link.kind].append((story.words[link.word].text, story.words[link.other].text))
    return dict(found)


def test_links_are_those_that_a_reader_finds():
    text = "The cats near two dogs see a box that the girl likes. It is heavy."
    assert linked(text) == {
        "determiner": [("cats", "The"), ("dogs", "two"), ("box", "a"), ("girl", "the")],
        "subject": [("see", "cats"), ("likes", "girl"), ("is", "It")],
        "object": [("see", "box"), ("likes", "box")],
        "antecedent": [("It", "box")],
    }


def test_a_question_is_linked_to_its_answer():
    found = linked("The king that sees two birds laughs. They hide. Who sees the birds? The king.")
    assert found["answer"] == [("king", "king")]
    assert found["object"] == [("sees", "birds"), ("sees", "birds")]
    assert found["subject"] == [("sees", "king"), ("laughs", "king"), ("hide", "They"), ("sees", "Who")]


def test_a_pronoun_stands_for_the_noun_behind_a_pronoun():
    found = linked("A queen sees some cups. She follows them. They fall.")
    assert found["antecedent"] == [("She", "queen"), ("them", "cups"), ("They", "cups")]


def test_reading_finds_the_links_and_options_of_writing():
    for story in STORIES:
        assert english.read(story.text)[:2] == (story.words[:-1], story.links)
        assert english.read(story.text).following == {"": 1.0} or story.words[-1].options.keys() > {""}


def test_verbs_agree_with_their_subjects():
    others = 0
    for story in STORIES:
        for link in story.links:
            subject, verb = story.words[link.other].text, story.words[link.word].text
            if link.kind == "subject" and subject.lower() not in ("he", "she", "it", "they", "who"):
                assert (subject in PLURAL) == (verb == "are" or not verb.endswith("s")), story.text
                between = {word.text for word in story.words[link.other + 1 : link.word]}
                others += bool(between & (SINGULAR if subject in PLURAL else PLURAL))
    assert others > 50, "agreement over a noun of the other number must occur"


def test_a_pronoun_has_one_antecedent_in_the_sentence_before():
    checked = 0
    for story in STORIES:
        sentences = [re.findall(r"\w+", sentence) for sentence in story.text.split(".")]
        for before, sentence in itertools.pairwise(sentences):
            if not sentence or sentence[0] not in ("He", "She", "It", "They"):
                continue
            if any(word.lower() in ("he", "him", "she", "her", "it", "they", "them") for word in before):
                continue  # its antecedents are further back
            nouns = [word for word in before if word in SINGULAR | PLURAL]
            fits = {
                "They": lambda noun: noun in PLURAL,
                "He": lambda noun: noun in PERSONS["he"],
                "She": lambda noun: noun in PERSONS["she"],
                "It": lambda noun: noun in SINGULAR - PERSONS["he"] - PERSONS["she"],
            }[sentence[0]]
            (antecedent,) = filter(fits, nouns)
            checked += 1
            if sentence[1] in ("is", "are"):
                assert stem(antecedent) in SAID_OF[sentence[2]], story.text
    assert checked > 100


def test_probabilities_sum_to_one_and_fit_the_frequencies():
    expected, seen = collections.Counter(), collections.Counter()
    for story in STORIES:
        for word in story.words:
            assert sum(word.options.values()) == pytest.approx(1) and word.text in word.options
            expected.update(word.options)
            seen[word.text] += 1
    for word, count in expected.items():
        assert abs(seen[word] - count) < 4.5 * np.sqrt(count) + 3, word


def test_the_probability_of_a_story_is_that_of_its_words():
    """Count a whole story, of the shortest kind, among many."""
    text = "Two cats hide. They eat."
    nats = sum(word.nats for word in english.read(text).words)
    by_hand = 1 / 4 * (0.75 / 14) * (0.45 * 0.2 / 2) * (0.7 * 1.0) * (0.2 / 2)
    assert np.exp(-nats) == pytest.approx(by_hand)


def test_a_wrong_word_is_refused_with_its_place():
    with pytest.raises(UserError, match=r"found 'see' after 'The cat near the dogs'; .* sees, likes"):
        english.read("The cat near the dogs see a box.")
    with pytest.raises(UserError, match=r"found 'He' after 'The queen laughs \.'; .* She"):
        english.read("The queen laughs. He sings.")
    assert english.read("The cats that see a").following.keys() > {"boy", "big"}


def test_stories_stay_the_same_and_their_splits_share_no_first_sentence():
    first = [english.write(seed).text for seed in range(50)]
    assert hashlib.sha256("\n".join(first).encode()).hexdigest()[:12] == "85b33e3e7b98", "increase english.VERSION"
    found = {split: list(itertools.islice(english.stories(split), 100)) for split in splits.SPLITS}
    openings = {split: {story.text.split(".")[0] for story in stories} for split, stories in found.items()}
    assert not openings["train"] & openings["validation"] and not openings["train"] & openings["test"]
    shares = collections.Counter(english.split_of(story) for story in STORIES)
    assert shares["train"] / len(STORIES) == pytest.approx(0.75, abs=0.1)


def test_the_tokens_of_the_corpus_are_its_words(small, monkeypatch):
    monkeypatch.setattr(english, "STORIES", 300)
    english._texts.cache_clear()
    data = small(data__corpus="english", data__tokenizer="words", data__path=None).data
    corpus = corpora.open_corpus(data)
    tokenizer = token_store.fit_tokenizer(corpus, data)
    store = token_store.open_store(corpus, data, tokenizer)
    for split in splits.SPLITS:
        expected = []
        for story in english.stories(split):
            assert [tokenizer.texts[token].decode() for token in tokenizer.encode(story.text)] == story.tokens[:-1]
            expected += [*tokenizer.encode(story.text), tokenizers.separator(tokenizer)]
        np.testing.assert_array_equal(store.tokens(split), expected[:-1])
    english._texts.cache_clear()


def test_stories_in_the_docs_follow_the_grammar():
    guide = (REPOSITORY / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.+)$", guide, re.MULTILINE) + re.findall(r'english\.read\("(.+)"\)', guide)
    quoted += re.findall(r'^"(The cats.+?)"', english.__doc__, re.MULTILINE)
    assert len(quoted) == 5
    for text in quoted:
        assert english.read(text).text == text
