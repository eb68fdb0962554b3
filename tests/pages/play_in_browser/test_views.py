"""The playground's views and next tokens in Chromium are the model's, at the place that was chosen."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from selenium.webdriver.common.by import By

from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight import observing
from mini_gpt.insight.attention import attention_maps
from tests.pages.play_in_browser.play_page import LIMIT, TEXT, losses_of, without_head

pytestmark = pytest.mark.slow


def test_the_bars_are_the_models_next_tokens(page, runs):
    page.open("one", edits0=json.dumps({"heads": {"0.1": "off"}}))
    tokens = ByteTokenizer().encode(TEXT)[None].astype(np.int32)
    model = without_head(runs[0].model, 0, 1)
    logits_V = np.asarray(model.logits(tokens))[0, -1].astype(np.float64)
    shares_V = np.exp(logits_V - logits_V.max()) / np.exp(logits_V - logits_V.max()).sum()
    read = "(bar) => [+bar.dataset.token, +bar.dataset.probability]"
    bars = page.js(f"return [...document.querySelectorAll('#next-0 .next')].map({read})")
    assert [token for token, _ in bars[:5]] == np.argsort(-shares_V)[:5].tolist()
    for token, share in bars:
        assert share == pytest.approx(shares_V[token], abs=LIMIT)


def test_views_show_the_models_attention_lens_and_norms(page, runs):
    model, tokens = runs[0].model, ByteTokenizer().encode(TEXT)[None].astype(np.int32)
    place = 9
    weights_LS = attention_maps(model, tokens)[1].weights_BHLS[0, 2]
    page.open("one", layer=1, head=2, pin=place)
    page.wait(lambda: page.js("return document.querySelector('#flow-0').title"))
    said = page.js("return [...document.querySelectorAll('#flow .token')].map((token) => token.title)")
    assert said == [f"weight {weight:.3f}" for weight in weights_LS[place]]
    page.open("one", layer=1, head=2, pin=place, view="map")
    page.wait(lambda: "weight" in page.find("pointed").text)
    assert f"weight {weights_LS[place].max():.4f}" in page.find("pointed").text

    module = model.merge()
    layers = observing.layers(module, model.with_layout(jnp.asarray(tokens)))
    streams = [layers[0].before_BLD, *(layer.after_BLD for layer in layers)]
    page.open("one", pin=place, view="stream")
    norms = page.js("return [...document.querySelectorAll('[data-norm]')].map((cell) => +cell.textContent)")
    assert norms == [pytest.approx(np.linalg.norm(x_BLD[0, place]), abs=0.051) for x_BLD in streams]
    page.open("one", pin=place, view="lens")
    for layer, x_BLD in enumerate(streams[1:]):
        likely = int(np.asarray(module.logits(module.finish(x_BLD)))[0, place].argmax())
        cell = f'return document.querySelector(\'[data-layer="{layer}"][data-place="{place}"]\').title'
        label = page.js("return labelOf(Tokenizer.of(JSON.parse(data.textContent).tokenizer), arguments[0])", likely)
        assert page.js(cell).startswith(f"{label} ")


def test_each_view_opens_on_a_token_that_fits_it(page, runs):
    model, text = runs[0].model, f"{TEXT}\n\n"
    tokens = ByteTokenizer().encode(text)[None].astype(np.int32)
    stream_LD = observing.layers(model.merge(), model.with_layout(jnp.asarray(tokens)))[-1].after_BLD[0]
    last, loss = len(TEXT) - 1, 1 + int(losses_of(model, text).argmax())
    norm = int(np.linalg.norm(stream_LD, axis=-1).argmax())
    assert len({last, loss, norm}) == 3
    marks = {
        "attention": (last, "return +document.querySelector('#flow .pointed').id.split('-')[1]"),
        "map": (last, "return +/^query (\\d+)/.exec(pointed.textContent)[1]"),
        "loss": (loss, "return +/^place (\\d+)/.exec(pointed.textContent)[1]"),
        "lens": (
            last,
            "return [...document.querySelectorAll('.lens th button')].findIndex((e) => e.matches('.here')) +"
            " +document.querySelector('td[data-place]').dataset.place",
        ),
        "stream": (
            norm,
            f"return Math.round(parseFloat(document.querySelector('.strips .mark').style.left) / 100 * {len(text)})",
        ),
    }
    for view, (place, script) in marks.items():
        page.open("one", view=view, text=text)
        page.wait(lambda view=view: page.browser.find_elements(By.CSS_SELECTOR, "#pointed, #flow, .lens, .strips"))
        page.wait(lambda place=place, script=script: page.js(script) == place)
        assert page.find("opening").text.startswith("Marked at first: the ")
        page.open("one", view=view, text=text, pin=5)
        page.wait(lambda script=script: page.js(script.replace(".pointed", ".pinned")) == 5)
        assert not page.browser.find_elements(By.ID, "opening")


@pytest.mark.parametrize(("start", "end", "place"), [(0, 0, 0), (4, 7, 6), (9, 9, 8), (21, 21, 20)])
def test_next_token_follows_the_cursor_or_what_is_selected(page, start, end, place):
    page.open("one").find("text").click()
    page.js("document.getElementById('text').setSelectionRange(arguments[0], arguments[1])", start, end)
    page.wait(lambda: page.settle().state.get("pin") == str(place))
    before = page.js("return document.querySelector('.after q').textContent")
    assert before == ("…" if place > 11 else "") + TEXT[: place + 1][-12:]
