"""Multiple choice and last words: numbers of lm-evaluation-harness, tokens and metrics by hand, bad files."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import layout
from mini_gpt.data.tokenizers import ByteTokenizer, WordTokenizer
from mini_gpt.evaluation import items, task_accuracy
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import choices
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.choices import Choices, Item
from mini_gpt.training.run import Run
from tests.suites import harness

CUT = {"HellaSwag": 2, "ARC": 1, "PIQA": 2, "BLiMP": 0, "own": 0, "LAMBADA": 1}  # of 3 items


def test_numbers_are_those_of_the_evaluation_harness(tmp_path):
    stored, (model, tokenizer) = json.loads(harness.STORED.read_text()), harness.model()
    assert {*stored} == {*harness.ITEMS} == {*choices.KINDS}
    for kind, records in harness.ITEMS.items():
        found, of_file = choices.read(harness.write(records, tmp_path / "items.jsonl"))
        assert found == kind
        wanted = stored[kind].pop("log_probabilities")
        p_P, _, cut_P = choices.log_probabilities(model, tokenizer, of_file)
        np.testing.assert_allclose(p_P, wanted, atol=2e-4)
        row = choices.measure(model, tokenizer, of_file)
        numbers = {"acc": row["acc"], "acc_norm": row["acc_norm"], "perplexity": np.exp(row["nll"])}
        assert stored[kind] == pytest.approx({name: numbers[name] for name in stored[kind]}, rel=1e-3)
        assert cut_P.any() == (row["cut"] > 0) and row["cut"] == CUT[kind]


class Merging(ByteTokenizer):
    """Bytes, but "d " is one token, and a text begins with the separator."""

    before = (256,)

    def encode(self, text):
        return np.array([256, *text.replace("d ", "\x01").encode()], np.uint32)


def test_a_text_is_cut_after_as_many_tokens_as_its_context_has():
    parts = lambda tokenizer, *texts: [tokens.tolist() for tokens in choices.encode(tokenizer, *texts)]
    plain = ByteTokenizer()
    assert parts(plain, "ab", " c") == [[97, 98], [32, 99]]
    assert parts(plain, "a \n", " c") == [[97], [32, 10, 32, 99]], "spaces belong to the continuation"
    assert parts(plain, "", " c") == parts(plain, " ", "c") == [[256], [32, 99]]
    assert parts(Merging(), "ad", " c") == [[256, 97, 100], [99]], "the model reads d, and c is after as many tokens"
    assert parts(Merging(), "", " c") == [[256], [32, 99]]
    assert parts(Merging(), "", "") == [[256], []]
    named = SimpleNamespace(special={"bos_token": "<s>"}, encode_part=plain.encode)
    named.encode_prompt = lambda text, add_special_tokens: {"<s>": [7]}[text]
    assert parts(named, "", " c") == [[7], [32, 99]]
    assert parts(named, "", "\x07c") == [[7], [99]], "a text with this token of its own"


# Two items, of two and three continuations, and one continuation: log-probabilities of their tokens, and what is right.
FOUND = [Item("", ["ab", "abcdef"], 1), Item("", ["a", "b", "cc"], 0)]
NLL = [np.array(nll, np.float32) for nll in ([1.0, 1.0], [1.0, 1.5], [3.0], [4.0], [1.5, 2.5])]


def test_metrics_are_those_by_hand(monkeypatch):
    model = SimpleNamespace(config=harness.model()[0].config, rows_at_a_time=lambda length, kept: 1)
    right = [np.array([False])] * 4 + [np.array([True, True])]
    of_all = lambda nll, right: monkeypatch.setattr(
        task_accuracy, "predict", lambda model, batches: SimpleNamespace(nll=nll, right=right)
    )
    of_all(NLL, right)
    row = choices.measure(model, ByteTokenizer(), FOUND)
    # Sums -2, -2.5 and -3, -4, -4; for each character -1, -0.42 and -3, -4, -2.
    assert (row["acc"], row["acc_norm"], row["nll"], row["cut"]) == (0.5, 0.5, (2.5 + 3.0) / 2, 0)
    by_item = {metric: items.unpacked(packed).sums_P.tolist() for metric, packed in row["items"].items()}
    assert by_item == {"acc": [0, 1], "acc_norm": [1, 0], "nll": [2.5, 3]}
    share, z = 0.5, 1.959963984540054
    middle, half = share + z**2 / 4, z * np.sqrt(share * (1 - share) / 2 + z**2 / 16)
    assert [row["acc_low"], row["acc_high"]] == pytest.approx([(middle + s * half) / (1 + z**2 / 2) for s in (-1, 1)])
    of_all(NLL[:3], [np.array([True, True]), np.array([True, False]), np.array([True])])
    row = choices.measure(model, ByteTokenizer(), [Item("x", [word], 0) for word in ("ab", "cd", "e")])
    assert (row["acc"], row["acc_norm"], row["nll"]) == (2 / 3, None, 7.5 / 3)
    assert {*row["items"]} == {"acc", "nll"}


def test_both_forms_of_arc_have_the_same_items(tmp_path):
    of_hub = harness.ITEMS["ARC"]
    of_authors = []
    for record in of_hub:
        pairs = zip(*record["choices"].values(), strict=True)
        stem = {"stem": record["question"], "choices": [{"text": text, "label": label} for text, label in pairs]}
        of_authors.append(record | {"question": stem, "choices": None})
    read = lambda records: choices.read(harness.write(records, tmp_path / "arc.jsonl"))
    assert read(of_authors) == read(of_hub)


PIQA = {"goal": "a", "sol1": "b", "sol2": "c"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "found 'no item'; give a JSON object in each line"),
        ("{}\n", r"line 1: no item of a known kind .*found the fields \[\]; must be of HellaSwag: activity_label"),
        (json.dumps(PIQA), r"line 1: no item of .*found the fields \['goal', 'sol1', 'sol2'\]; .*PIQA: goal, sol1, "),
        (json.dumps(PIQA | {"label": -1}), r"line 1: no item of PIQA with its right answer \(found Item"),
        (json.dumps(PIQA | {"label": 1}) + "\n\n{", "line 3: no item of PIQA with its right answer .Expecting"),
        (json.dumps({"text": "ends with a space "}), "line 1: no item of LAMBADA with its right answer"),
        (json.dumps({"query": "a", "choices": [3], "gold": 0}), "line 1: no item of own with its right answer"),
        (json.dumps({"query": "a", "choices": "ab", "gold": 0}), "line 1: no item of own with its right answer"),
        ("3\n", "line 1: no item of a known kind with its right answer"),
        ("\xff\n", "line 1: no item of a known kind .*codec can't decode byte 0xff"),
    ],
)
def test_a_line_without_an_item_is_refused(text, message, tmp_path):
    (tmp_path / "items.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=f"^{tmp_path}/items.jsonl(, |: ){message}"):
        choices.read(tmp_path / "items.jsonl")


def test_items_are_needed_and_each_file_has_its_own_name(small, tmp_path):
    suites.check(["choices"], SuiteOptions())
    refused = lambda items: pytest.raises(UserError, match="^" + re.escape(f"--items: found {items!r}"))
    with refused(None):
        Choices().check(small(), SuiteOptions())
    with refused("none/*.jsonl"):
        Choices().check(small(), SuiteOptions(items="none/*.jsonl"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        harness.write(harness.ITEMS["PIQA"], tmp_path / folder / "piqa.jsonl")
    with refused("piqa.jsonl"):
        Choices().check(small(), SuiteOptions(items=f"{tmp_path}/*/*.jsonl"))
    options = SuiteOptions(items=f"{tmp_path}/a/*.jsonl")
    assert Choices().compared(small(), options) == [("piqa.jsonl", 32)]
    assert Choices().cost(small(), options, 0) == 6 * 32


def test_a_continuation_must_fit_into_the_context(monkeypatch):
    model, tokenizer = harness.model()
    refused = lambda count: pytest.raises(UserError, match=rf"^item 2: tokens: found {count}; must be in 1\.\.48, the")
    with refused(49):
        choices.log_probabilities(model, tokenizer, [Item("a", ["b"], 0), Item("a", ["x" * 48], 0)])
    monkeypatch.setattr(tokenizer, "encode", lambda text: np.array([1] * min(len(text), 5)))  # a merge of both
    with refused(0):
        choices.log_probabilities(model, tokenizer, [Item("a", ["b"], 0), Item("abcdef", ["b"], 0)])


@pytest.mark.parametrize(
    "fields",
    [
        {"model.rope.scaling": "dynamic", "model.rope.factor": 4.0, "model.rope.original_context": 16},
        {"model.random_positions": 512},
    ],
    ids=str,
)
def test_padding_does_not_change_positions(fields):
    model, tokenizer = harness.model(**fields)
    p_P, *_ = choices.log_probabilities(model, tokenizer, [Item("Four people sit in", ["a", "a long boat"], 0)])
    for number, (p, choice) in enumerate(zip(p_P, ("a", "a long boat"), strict=True)):
        tokens = tokenizer.encode(f"Four people sit in {choice}").astype(int)
        key_B = layout.keys_of(np.array([number]))  # for random positions
        logs_LV = jax.nn.log_softmax(model.logits(tokens[None, :-1], None, key_B)[0])
        wanted = sum(float(logs_LV[at - 1, tokens[at]]) for at in range(len("Four people sit in"), len(tokens)))
        assert p == pytest.approx(wanted, abs=1e-4)


def test_a_result_records_the_items_that_it_was_measured_on(tmp_path):
    path = harness.write(harness.ITEMS["PIQA"], tmp_path / "piqa.jsonl")
    options = SuiteOptions(items=f"{tmp_path}/*.jsonl")
    before = suites.requested("choices", options)
    assert before == suites.requested("choices", options) and before["items"] == options.items
    harness.write(harness.ITEMS["PIQA"][:2], path)
    after = suites.requested("choices", options)
    assert after != before, "so a study measures again"
    harness.write(harness.ITEMS["ARC"], tmp_path / "arc.jsonl")
    assert suites.requested("choices", options) != after


@pytest.mark.slow
def test_the_suite_measures_each_file_of_a_pattern(trained, tmp_path, capsys):
    workdir = trained(data__tokenizer="bytes")
    for kind in ("PIQA", "LAMBADA"):
        harness.write(harness.ITEMS[kind], tmp_path / f"{kind}.jsonl")
    options = SuiteOptions(items=f"{tmp_path}/*.jsonl")
    run = Run(workdir, overrides={"context_length": "64"})
    result = suites.evaluate(run, "choices", options)
    assert [(row["file"], row["kind"], row["length"], row["problems"]) for row in result["rows"]] == [
        ("LAMBADA.jsonl", "LAMBADA", 64, 3),
        ("PIQA.jsonl", "PIQA", 64, 3),
    ]
    assert "acc_norm_high" in capsys.readouterr().out
    (written,) = (workdir / "eval").glob("choices,context_length=64,items=*.json")
    assert json.loads(written.read_text())["rows"] == result["rows"]


def test_a_word_that_the_tokenizer_lacks_is_named_with_its_file(tmp_path):
    path = harness.write([{"text": "the dog"}], tmp_path / "words.jsonl")
    run = SimpleNamespace(tokenizer=WordTokenizer(["the"]), model=harness.model()[0])
    run.config = run.model.config
    with pytest.raises(UserError, match=rf"^{path}: tokenizer: found the word ' dog', which its corpus lacks"):
        Choices().measure(run, SuiteOptions(items=str(path)))
