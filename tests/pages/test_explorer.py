"""The explorer page shows the model's numbers, parses no text as markup and works without a network."""

import base64
import json
import re
import sys
import zlib

import numpy as np
import pytest
from flax import nnx

from mini_gpt import suites
from mini_gpt.commands import eval as eval_command
from mini_gpt.data import spans, tokenizers
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import report as head_report
from mini_gpt.insight.heads import typical
from mini_gpt.model.positions.biases import T5
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.pages import document
from mini_gpt.pages.explorer import largest
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import explorer as explorer_suite
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.pages import node
from tests.random_models import random_model

COMMON = explorer.PAGE.parents[1] / "common"
HOSTILE = '</script><img src=x onerror="document.title=1"><script>document.title=2</script><!--\u2028&lt;b&gt;\n'


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def page_of(run: Run) -> dict:
    """Return the data of a page that shows the start of the validation split."""
    tokens = np.asarray(run.store.tokens("validation")[: explorer.most_tokens(run.config)], np.int32)
    return data_of(explorer.explorer(run.model, run.tokenizer, tokens, title="", subtitle=""))


def evaluated(run: Run, **options) -> dict:
    """Return the data of the page that the suite writes."""
    stem = suites.file_stem("explorer", SuiteOptions(**options))
    suites.evaluate(run, "explorer", SuiteOptions(**options))
    return data_of((run.workdir / "eval" / f"{stem}.html").read_text(encoding="utf-8"))


def unpacked(packed: dict, heads: int, length: int, keys: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute the logits and weights [heads, L, S] as the page does, but one pair at a time."""
    levels = iter(zlib.decompress(base64.b64decode(packed["logits"])))
    tops = iter(np.frombuffer(base64.b64decode(packed["row_max"]), "<f4").tolist())
    keys = length if keys is None else keys
    logits = np.full((heads, length, keys), -np.inf)
    for head in range(heads):
        for i in range(length):
            top = next(tops)
            for j in range(i + 1 if packed["causal"] else keys):
                level = next(levels)
                if level != packed["hidden"]:
                    logits[head, i, j] = top - packed["floor"] * (level / packed["steps"]) ** 2
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return logits, exp / exp.sum(-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"model__position": "rope"},
        {"model__attention_window": 5, "data__isolate_documents": True},
        {"model__causal": False, "train__objective": "masked", "model__position": "alibi"},
    ],
)
def test_the_page_holds_the_models_attention(small, tmp_path, fields):
    loop.train(small(train__steps=2, model__num_layers=2, **fields), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    data = page_of(run)
    packed, tokens = data["attention"], run.store.tokens("validation")[:32]
    assert packed["tokens"] == spans.decode_each(tokens, run.tokenizer)
    tokens_BL = np.asarray(tokens, np.int32)[None].repeat(8, axis=0)
    maps = attention_maps(run.model, tokens_BL)
    logits, weights = unpacked(packed, 8, 32)
    model = np.concatenate([layer.weights_BHLS[0] for layer in maps])
    assert np.abs(weights - model).max() == pytest.approx(packed["error"], abs=1e-6) and packed["error"] < 0.005
    given = np.concatenate([layer.logits_BHLS[0] for layer in maps])
    seen = np.broadcast_to(maps[0].visible_BLS[0], given.shape)
    assert (np.isfinite(logits) == seen).all()
    np.testing.assert_allclose(logits[seen], given[seen], atol=0.1)


@pytest.mark.slow
def test_a_given_text_is_shown_up_to_the_context(small, tmp_path):
    loop.train(small(train__steps=1, model__position="learned"), tmp_path / "run", conclude=False)
    run, text = Run(tmp_path / "run"), "Where is the cat? Where is the cat? Where?"
    data = evaluated(run, text=text)
    assert "".join(data["attention"]["tokens"]) == text[:32] and "32 tokens of the given text" in data["subtitle"]
    assert data["subtitle"].endswith(f"computed in {run.model.dtype}")
    with pytest.raises(UserError, match="--text: found ''; must have at least one character"):
        evaluated(run, text="")


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "t5"])
def test_the_page_holds_the_learned_positions(small, tmp_path, position):
    loop.train(small(train__steps=2, model__position=position), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    held = page_of(run)["positions"]
    parameters = run.model.parameters["positions"][position]
    if position == "learned":
        rows = np.asarray(parameters["embedding"], np.float64)[:: held["learned"]["every"]]
        size = held["learned"]["size"]
        shown = np.frombuffer(base64.b64decode(held["learned"]["cosines"]), np.int8).reshape(size, size) / 127
        for p, q in [(0, 0), (1, 3), (size - 1, 2)]:
            cosine = rows[p] @ rows[q] / np.sqrt((rows[p] @ rows[p]) * (rows[q] @ rows[q]))
            assert shown[p, q] == pytest.approx(cosine, abs=0.005)
        assert held["t5"] is None and len(rows) == size
    else:
        config = run.config.model
        encoding = T5(config, rngs=nnx.Rngs(0))
        encoding.bias_table[...] = parameters["bias_table"]
        length = 2 * config.t5.max_distance
        bias_BHLS = encoding.bias(np.full((1, 1), length - 1), np.arange(length)[None])
        np.testing.assert_allclose(held["t5"], np.asarray(bias_BHLS)[0, :, 0, ::-1], atol=1e-4)
        assert held["learned"] is None and np.ptp(held["t5"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_the_largest_page_stays_under_five_megabytes(small, causal):
    fields = {} if causal else {"model__causal": False, "train__objective": "masked"}
    config = small(context_length=512, model__num_layers=6, model__num_heads=6, model__d_model=48, **fields)
    length = explorer.most_tokens(config)
    assert length == (512 if causal else 362)
    # Logits for which all levels are equally frequent compress least.
    logits_NHLS = -explorer.FLOOR * np.random.default_rng(0).random((6, 6, length, length), np.float32) ** 2
    visible_LS = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    weights_NHLS = np.where(visible_LS, np.exp(logits_NHLS), 0)
    weights_NHLS /= weights_NHLS.sum(-1, keepdims=True)
    packed = explorer.packed(logits_NHLS, weights_NHLS, visible_LS, causal=causal)
    page = document.build(explorer.PAGE, {"attention": packed | {"tokens": ["<"] * length}})
    assert 4_000_000 < len(page) < 5_000_000 and packed["error"] < 0.05


def test_logits_that_do_not_fit_are_quantised_more_coarsely(monkeypatch):
    logits_NHLS = -np.random.default_rng(0).random((2, 2, 32, 32), np.float32)
    visible_LS = np.ones((32, 32), bool)
    weights_NHLS = np.exp(logits_NHLS) / np.exp(logits_NHLS).sum(-1, keepdims=True)
    pack = lambda: explorer.packed(logits_NHLS, weights_NHLS, visible_LS, causal=False)
    sizes = {254: len(pack()["logits"])}
    for most in (3_000, 2_000, 1_200):
        monkeypatch.setattr(explorer, "MOST_BYTES", most)
        packed = pack()
        assert len(packed["logits"]) <= most
        sizes[packed["steps"]] = len(packed["logits"])
        _, weights = unpacked(packed, 4, 32)
        assert np.abs(weights - weights_NHLS.reshape(4, 32, 32)).max() == pytest.approx(packed["error"], abs=1e-6)
    assert sorted(sizes.values()) == [sizes[steps] for steps in sorted(sizes)] and len(sizes) > 2
    monkeypatch.setattr(explorer, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="do not fit in a page"):
        pack()


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk", "yarn"])
def test_the_page_has_the_frequencies_of_the_runs_rope(small, scaling):
    scaled = {} if scaling == "none" else {"model__rope__scaling": scaling, "model__rope__factor": 4.0}
    config = small(model__position="rope", model__d_model=64, model__rope__base=500.0, **scaled)
    shown = explorer._positions(random_model(config, tokenizers.ByteTokenizer().token_bytes))
    encoding = Rope(config.model, rngs=nnx.Rngs(0))
    page = np.array(shown["factors"]) * np.array(shown["turns"]) ** np.log10(shown["base"])
    np.testing.assert_allclose(page, encoding.frequencies, rtol=1e-6)
    assert shown["scaling"] == (None if scaling == "none" else f"{scaling}, factor 4")


def as_shown(head):
    """Return the label of a row of the head report as the page holds it."""
    strength = head["kinds"][head["label"]]["strength"] if head["label"] in head["kinds"] else None
    return [head["label"], None if strength is None else round(strength, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["--checkpoint=best", "--split=test", "--config.model.attention_window=8"]])
def test_the_page_has_the_labels_of_the_same_evaluation(trained, monkeypatch, others):
    workdir = trained(model__position="rope")
    (workdir / "eval").mkdir(exist_ok=True)
    for stale in (workdir / "eval").iterdir():
        stale.unlink()
    arguments = [f"--workdir={workdir}", "--suite=explorer,heads", *others]
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    eval_command.main()
    (page,), (heads,) = (list((workdir / "eval").glob(f"{name}*")) for name in ("explorer*.html", "heads*.json"))
    labels = [as_shown(head) for head in json.loads(heads.read_text())["heads"]]
    assert data_of(page.read_text(encoding="utf-8"))["attention"]["labels"] == [labels]


def test_markup_in_a_text_is_escaped():
    page = document.build(explorer.PAGE, {"title": HOSTILE, "attention": {"tokens": [HOSTILE]}})
    assert page.count("</script>") == explorer.PAGE.read_text().count("</script>")
    assert HOSTILE not in page and "<img" not in page
    assert data_of(page)["title"] == HOSTILE
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import|fetch\(|XMLHttpRequest""", page), "no network"


def unpacked_long(held: dict, heads: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the weights [heads, L, S] of a page with the largest ones as the page does; also which are kept."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(held["logits"])), np.uint8).astype(int)
    kept, block = held["kept"], held["block"]
    sizes = [kept, kept, kept, -(-length // block), 1, 1, 1, 1]
    planes = np.split(raw, heads * length * np.cumsum(sizes)[:-1])
    low, high, levels, means, *ends = (plane.reshape(heads, length, -1) for plane in planes)
    first, last = (ends[n][..., 0] + 256 * ends[n + 1][..., 0] for n in (0, 2))
    weights, is_kept = np.zeros((heads, length, length)), np.zeros((heads, length, length), bool)
    weight_of = lambda level: np.exp(-held["floor"] * (level / held["steps"]) ** 2)
    for head, i in np.ndindex(heads, length):
        for j in range(first[head, i], last[head, i]):
            weights[head, i, j] = weight_of(means[head, i, j // block])
        at = 0
        for n in range(kept):
            if levels[head, i, n] != held["hidden"]:
                at += low[head, i, n] + 256 * high[head, i, n]
                weights[head, i, at], is_kept[head, i, at] = weight_of(levels[head, i, n]), True
    return weights / weights.sum(-1, keepdims=True), is_kept


LONG = [
    {"model__position": "rope"},
    {"model__position": "alibi", "model__attention_window": 20, "data__isolate_documents": True},
    {"model__position": "learned", "model__causal": False, "train__objective": "masked"},
]


@pytest.mark.slow
@pytest.mark.parametrize("length, fields", [(60, LONG[1]), *slow(*((300, fields) for fields in LONG))], ids=str)
def test_a_long_page_keeps_the_largest_weights(small, monkeypatch, length, fields):
    monkeypatch.setattr(largest, "KEPT", 5)
    monkeypatch.setattr(largest, "BLOCK", 8)
    config = small(context_length=length, model__num_layers=2, **fields)
    model = random_model(config, tokenizers.ByteTokenizer().token_bytes)
    tokens = np.random.default_rng(0).integers(0, 257, length).astype(np.int32)  # 256 is the separator
    held, _ = largest.packed(model, tokens, np.zeros((0, length, length), bool))
    shown, is_kept = unpacked_long(held, 8, length)
    maps = attention_maps(model, tokens[None])
    whole = np.stack([layer.weights_BHLS[0] for layer in maps])
    assert held["telling"] == typical.telling_head(typical.telling(whole, of_itself=True))
    weights = np.concatenate(whole)
    seen = np.concatenate([layer.seen_BHLS[0] for layer in maps])
    assert (is_kept.sum(-1) == np.minimum(5, seen.sum(-1))).all() and ((shown > 0) <= seen).all()
    least = np.where(is_kept, weights, 1).min(-1)
    assert (np.where(is_kept, 0, weights).max(-1) <= least).all(), "no weight that is left out is larger"
    error = np.abs(np.where(is_kept, shown - weights, 0)).max()
    assert error == pytest.approx(held["error"], abs=1e-6) and error < 0.03
    for head, i in [(0, length - 1), (3, length // 2), (7, 20)]:
        for block in range(0, length, 8):
            others = [j for j in range(block, min(length, block + 8)) if seen[head, i, j] and not is_kept[head, i, j]]
            if others:
                assert shown[head, i, others] == pytest.approx(weights[head, i, others].mean(), rel=0.2, abs=1e-5)


@pytest.mark.slow
def test_a_page_of_gpt2s_heads_stays_small(small):
    fields = {"model__num_layers": 12, "model__num_heads": 12, "model__d_model": 48, "context_length": 1024}
    fields["model__scan_layers"] = True
    config = small(**fields)
    assert explorer.most_tokens(config) == 1024 and explorer.most_tokens(small(context_length=1024)) == 512
    model = random_model(config, tokenizers.ByteTokenizer().token_bytes, noise=0.5)
    tokens = np.random.default_rng(0).integers(0, 256, 1024).astype(np.int32)
    page = explorer.explorer(model, tokenizers.ByteTokenizer(), tokens, title="", subtitle="")
    assert 5_000_000 < len(page) < 20_000_000 and data_of(page)["attention"]["kept"] == 32


@pytest.mark.slow
def test_heads_are_labelled_without_a_result_of_heads(trained, monkeypatch):
    run = Run(trained(model__position="rope"))
    for stale in (run.workdir / "eval").glob("heads*"):
        stale.unlink()
    measured = head_report.head_report(
        run.model,
        run.tokenizer,
        head_inputs.of_text(run.store.tokens("validation"), run.tokenizer, run.config.context_length, 8192),
        run.store.tokens("train"),
    )
    data = evaluated(run)
    assert data["attention"]["labels"] == [[as_shown(head) for head in measured]]
    assert data["labels_from"] == "up to 8,192 tokens of the validation split of text"
    monkeypatch.setattr(explorer_suite, "MOST_PARAMETERS", 0)
    data = evaluated(run)
    assert data["attention"]["labels"] is None and data["labels_from"] is None


def test_the_error_beside_a_value_is_the_stated_error_rounded_up():
    errors = [0.00006, 0.00335, 0.0034, 0.0234, 0.0991, 0.4, 3.21]
    program = "{ return given.map((error) => [withError(0.00123, error), roundedUp(error)]); }"
    found = node.evaluate([explorer.PAGE.parent / "attention.js"], program, errors)
    for (shown, stated), error in zip(found, errors, strict=True):
        assert shown.endswith(f" ± {stated}") and error <= float(stated) <= max(1.1 * error, 1e-4)
    assert found[1] == ["0.0012 ± 0.0034", "0.0034"]
