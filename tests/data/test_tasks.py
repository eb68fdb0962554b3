"""Tasks: splits, batches, and answers, which separate solvers compute from the questions."""

import calendar
import itertools
from collections import Counter

import numpy as np
import pytest

from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.tasks import published, reasoning
from mini_gpt.runtime.errors import UserError
from tests.data.language_solvers import GERMAN_NOUNS, GERMAN_VERBS
from tests.data.solvers import SOLVERS, UNITS, solve_addition

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
            assert len(f"{question}={answer}\n") <= task.size(length)
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
        for english, german in aligned:
            if english in nouns:
                assert german in GERMAN_NOUNS[" ".join(nouns[english])][:2]
            for words, translated in GERMAN_VERBS.items():
                assert (english in words.split()) == (german in translated.split())
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
