"""The playground in Chromium: its losses are the model's, and edits, state, keyboard and pictures work."""

import base64
import dataclasses
import io
import json
import urllib.parse

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt.data import tasks
from mini_gpt.data.simple_tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from mini_gpt.data.tokenizers import BpeTokenizer
from mini_gpt.evaluation.perplexity import make_nll_fn
from mini_gpt.evaluation.scoring import score_tokens
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model import editing
from mini_gpt.pages.play import page as playground
from tests.conftest import make_text
from tests.pages import browser as chromium
from tests.pages.test_play import shown

pytestmark = pytest.mark.slow
TEXT = "the cat sat on the mat"
LIMIT = 1e-4
LETTERS = CharacterTokenizer(tasks.ALPHABET)
COPY = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}
WORDS = WordTokenizer.of_texts([make_text(0, 100)])
MODEL = {"model__num_layers": 2, "model__position": "rope"}
SSMAX = {"model__position": "alibi", "model__variants__query_scale": "ssmax", "model__attention_window": 5}
VIEWS = ("attention", "map", "loss", "lens", "stream")


@pytest.fixture(scope="module")
def runs():
    return [shown("one", **MODEL), shown("two", **MODEL | {"model__position": "alibi"})]


@pytest.fixture(scope="module")
def pages(tmp_path_factory, runs):
    """Write a page of one run, of two runs, of a run with learned positions, and of one with subwords."""
    root, byte = tmp_path_factory.mktemp("pages"), ByteTokenizer()
    bpe = BpeTokenizer.train([make_text(0, 500)], 300)
    written = {
        "one": playground.play(runs[:1], byte, TEXT, title="one"),
        "two": playground.play(runs, byte, make_text(0, 40)[:128], title="two"),
        "learned": playground.play([shown(model__position="learned")], byte, TEXT, title="learned"),
        "words": playground.play([shown("words", WORDS)], WORDS, "the cat sat", title="words", other="the dog ran"),
        "task": playground.play([shown("task", LETTERS, **COPY)], LETTERS, "abc=abc\n", title="task"),
        "ssmax": playground.play([shown("ssmax", **SSMAX)], byte, TEXT, title="ssmax"),
        "bpe": playground.play([shown("bpe", bpe)], bpe, TEXT, title="bpe"),
    }
    for name, page in written.items():
        (root / f"{name}.html").write_text(page, encoding="utf-8")
    return root


class Page:
    """A page in the browser."""

    def __init__(self, browser, root):
        self.browser, self.root = browser, root

    def open(self, name, **state):
        self.browser.get("about:blank")
        self.browser.get(f"{(self.root / name).as_uri()}.html#{urllib.parse.urlencode(state)}")
        self.wait(lambda: self.js("return document.documentElement.dataset.ready"))
        return self.settle()

    def js(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition):
        WebDriverWait(self.browser, 30, poll_frequency=0.02).until(lambda _: condition())

    def settle(self):
        """Wait until the page shows the results of what was entered last."""
        self.browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 30))")
        self.wait(lambda: self.js("return document.documentElement.dataset.busy") == "no")
        return self

    def find(self, name):
        return self.browser.find_element(By.ID, name)

    def click(self, name):
        self.js("document.getElementById(arguments[0]).click()", name)
        return self.settle()

    def write(self, text):
        field = self.find("text")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)
        return self.settle()

    def losses(self):
        """Return the losses of the sentences, in nats per token, by run."""
        read = "[...p.querySelectorAll('[data-loss]')].map((b) => +b.dataset.loss)"
        return self.js(f"return [...document.querySelectorAll('.headline')].map((p) => {read})")

    @property
    def said(self):
        return self.find("said").text

    @property
    def state(self):
        self.browser.execute_async_script("setTimeout(arguments[0], 250)")
        return dict(urllib.parse.parse_qsl(urllib.parse.urlparse(self.browser.current_url).fragment))


@pytest.fixture
def page(browser, pages):
    yield Page(browser, pages)
    logged = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not logged


def losses_of(model, text, tokenizer=None):
    tokens = (tokenizer or ByteTokenizer()).encode(text)
    size = len(tokens) - 1
    return score_tokens(make_nll_fn(model), tokens, window=size, stride=size, batch_size=1)


def without_head(model, layer, head):
    mask_NBH = np.ones((2, 1, 4), np.float32)
    mask_NBH[layer, 0, head] = 0
    return dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NBH)))


def test_a_typed_text_has_the_losses_of_the_model(page, runs):
    text = "Größe, naïve — x\n  <b>y</b>"
    page.open("one").write(text)
    wanted = losses_of(runs[0].model, text)
    assert page.losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]
    shown_values = page.js(
        "return [...document.querySelectorAll('.paint span')].map((span) => [+span.dataset.last, span.dataset.value])"
    )
    found = {last: float(value) for last, value in shown_values if value not in (None, "null")}
    sums = {}  # of the bytes of each character
    last = -1
    for character in text:
        first, last = last + 1, last + len(character.encode())
        sums[last] = wanted[max(0, first - 1) : last].sum()
    del sums[0]  # the first token has no loss
    assert found == {place: pytest.approx(value, abs=LIMIT) for place, value in sums.items()}


@pytest.mark.parametrize("has_kernel", [True, False])
def test_webassembly_is_used_where_the_policy_allows_it(page, pages, runs, has_kernel):
    """The worker of the page computes in WebAssembly; without it, the losses are the same."""
    html, allowed = (pages / "one.html").read_text(encoding="utf-8"), " 'wasm-unsafe-eval'"
    assert html.count(allowed) == 1
    (pages / "policy.html").write_text(html if has_kernel else html.replace(allowed, ""), encoding="utf-8")
    page.open("policy").write(TEXT)
    wanted = losses_of(runs[0].model, TEXT)
    assert page.losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]
    script = """
    const parts = [...document.querySelectorAll('script[type="text/js-worker"]')].map((part) => part.textContent);
    parts.push("self.postMessage(Kernel.of(new Float32Array(4)) !== null);");
    const worker = new Worker(URL.createObjectURL(new Blob([parts.join("\\n")], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => arguments[0](data);"""
    assert page.browser.execute_async_script(script) is has_kernel
    if not has_kernel:
        page.browser.get_log("browser")  # the browser reports what its policy forbids


def test_subwords_have_the_losses_of_the_model(page, pages):
    page.open("bpe").write("the cat sat under")
    bpe = BpeTokenizer.train([make_text(0, 500)], 300)
    wanted = losses_of(shown("bpe", bpe).model, "the cat sat under", bpe)
    assert len(wanted) < 12
    assert page.losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]


def test_words_without_a_token_are_left_out_and_said(page):
    page.open("words").write("the cat zzz sat")
    unknown = page.js("return [...document.querySelectorAll('.paint .unknown')].map((part) => part.textContent)")
    assert unknown == [" zzz"] and page.js("return document.querySelector('.note').textContent").endswith("␣zzz")
    wanted = losses_of(shown("words", WORDS).model, "the cat sat", WORDS)
    assert page.losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]


def test_the_other_text_of_the_command_is_there(page):
    page.open("words")
    assert page.find("other").get_attribute("value") == "the dog ran"
    page.click("head-0.1").click("head-0.1").click("head-0.1")
    assert page.said.startswith("Head 0.1 from the other text")


def test_an_edit_changes_the_loss_as_in_the_model(page, runs):
    page.open("one").click("head-1.2")
    edited = losses_of(without_head(runs[0].model, 1, 2), TEXT).mean()
    plain = losses_of(runs[0].model, TEXT).mean()
    assert abs(edited - plain) > 0.02
    assert page.losses() == [[pytest.approx(plain, abs=LIMIT), pytest.approx(edited, abs=LIMIT)]]
    assert page.said.startswith("Head 1.2 off: loss ")
    change = page.browser.find_element(By.CSS_SELECTOR, ".change").text
    assert change == f"{round(edited, 3) - round(plain, 3):+.3f}".replace("-", "−")
    rows = page.js("return [...document.querySelectorAll('.history tbody td')].map((cell) => cell.textContent)")
    assert rows == ["Head 1.2 off", f"{plain:.3f}", f"{edited:.3f}", change]
    page.click("reset")
    assert page.losses() == [[pytest.approx(plain, abs=LIMIT)]]


def test_measured_heads_show_the_change_of_the_loss(page, runs):
    page.open("one").click("measure")
    page.wait(lambda: not page.find("measure").get_attribute("disabled"))
    plain = losses_of(runs[0].model, TEXT).mean()
    for layer, head in ((0, 0), (1, 3)):
        change = losses_of(without_head(runs[0].model, layer, head), TEXT).mean() - plain
        label = page.find(f"head-{layer}.{head}").get_attribute("aria-label")
        assert f"changes the loss by {change:+.3f} nats".replace("-", "−") in label


def test_the_lens_is_computed_only_where_it_is_shown(page):
    page.open("one", view="loss", text="the cat")
    page.click("measure")
    page.wait(lambda: page.find("measure").is_enabled())
    effects = page.find("head-1.3").get_attribute("aria-label")
    page.js(
        "window.asked = []; const send = engines.send;"
        "engines.send = (request, reply) => { asked.push(request.ask?.lens); return send(request, reply); };"
    )
    page.click("tab-lens")
    assert page.js("return asked") == [3] and page.browser.find_elements(By.CSS_SELECTOR, "td[data-layer='1']")
    assert "off changes the loss by" in effects and effects == page.find("head-1.3").get_attribute("aria-label")
    page.click("tab-loss").click("tab-lens").click("tab-stream")
    assert page.js("return asked") == [3]
    page.write("the dog")
    assert set(page.js("return asked.slice(1)")) == {0}


def test_a_selected_part_has_its_own_loss(page, runs):
    wanted = losses_of(runs[0].model, TEXT)
    select = """const field = document.getElementById("text"); field.focus(); field.setSelectionRange(...arguments);
        field.dispatchEvent(new Event("select", { bubbles: true }));"""
    page.open("one").js(select, 4, 7)
    assert page.settle().losses() == [[pytest.approx(wanted[3:6].mean(), abs=LIMIT)]]
    assert page.said.startswith("The loss of the selected part is") and "(3 predicted tokens)" in page.said
    assert page.state["range"] == "4-6"
    page.open("one", **page.state).click("head-1.2")
    edited = losses_of(without_head(runs[0].model, 1, 2), TEXT)
    assert page.losses() == [[pytest.approx(values[3:6].mean(), abs=LIMIT) for values in (wanted, edited)]]
    page.click("measure")
    page.wait(lambda: not page.find("measure").get_attribute("disabled"))
    page.click("reset").js(select, 0, len(TEXT))
    assert page.settle().losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]
    page.open("one", range="9-99999", edits0='{"scale":"off"}').write("abc")
    assert len(page.losses()[0]) == 2


def test_the_loss_of_a_task_is_that_of_the_answer(page):
    wanted = losses_of(shown("task", LETTERS, **COPY).model, "abc=abc\n", LETTERS)[3:]
    assert page.open("task").losses() == [[pytest.approx(wanted.mean(), abs=LIMIT)]]
    assert page.said.startswith("The loss of the answer is") and "(4 predicted tokens)" in page.said


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


def test_ghosts_are_the_unedited_models_probabilities(page, runs):
    page.open("one", edits0=json.dumps({"scale": "off"}))
    tokens = ByteTokenizer().encode(TEXT)[None].astype(np.int32)
    logits_V = np.asarray(runs[0].model.logits(tokens))[0, -1].astype(np.float64)
    shares_V = np.exp(logits_V - logits_V.max()) / np.exp(logits_V - logits_V.max()).sum()
    read = "(ghost) => [+ghost.closest('.next').dataset.token, parseFloat(ghost.style.width) / 100]"
    ghosts = page.js(f"return [...document.querySelectorAll('#next-0 .ghost')].map({read})")
    assert len(ghosts) >= 3
    for token, share in ghosts:
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
    assert f"weight {weights_LS[place, place]:.4f}" in page.find("pointed").text

    module = model.merge()
    stream = lambda trace: (trace.before_BLD, trace.after_BLD)
    layers = module.forward(model.with_layout(jnp.asarray(tokens)), trace=stream)[2]
    streams = [layers[0][0], *(after_BLD for _, after_BLD in layers)]
    page.open("one", pin=place, view="stream")
    norms = page.js("return [...document.querySelectorAll('[data-norm]')].map((cell) => +cell.textContent)")
    assert norms == [pytest.approx(np.linalg.norm(x_BLD[0, place]), abs=0.051) for x_BLD in streams]
    page.open("one", pin=place, view="lens")
    for layer, x_BLD in enumerate(streams[1:]):
        likely = int(np.asarray(module.unembed(x_BLD))[0, place].argmax())
        cell = f'return document.querySelector(\'[data-layer="{layer}"][data-place="{place}"]\').title'
        label = page.js("return labelOf(Tokenizer.of(JSON.parse(data.textContent).tokenizer), arguments[0])", likely)
        assert page.js(cell).startswith(f"{label} ")


def test_the_address_restores_text_edits_and_view(page):
    edits = {"heads": {"0.3": "mean"}, "layers": [1], "scale": "off", "start": 500, "rope": {"base": 100}, "window": 5}
    page.open("one").write("other text")
    state = {"edits0": json.dumps(edits), "view": "lens", "unit": "bits", "theme": "dark", "pin": 4}
    page.open("one", **page.state | state)
    assert page.find("text").get_attribute("value") == "other text"
    phrases = (
        "Head 0.3 at its mean",
        "layer 1 off",
        "no division",
        "window of 5",
        "positions from 500",
        "RoPE base 100",
    )
    assert all(phrase in page.said for phrase in phrases) and "bits per token" in page.said
    assert page.find("tab-lens").get_attribute("aria-selected") == "true"
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    assert json.loads(page.state["edits0"]) == edits and page.state["pin"] == "4"


@pytest.mark.parametrize(
    "state",
    [
        {"edits0": "{", "view": "no", "run": "9", "layer": "-1", "pin": "x", "temperature": "1e9"},
        {"edits0": '{"heads":{"9.9":"off","x":1},"layers":[-1,2.5],"rope":{"base":0}}'},
        {"edits0": '{"heads":[],"start":"x","patch":{"tokens":[999]},"__proto__":{"a":1}}', "edits1": "[]"},
    ],
)
def test_a_damaged_address_leaves_a_page_that_works(page, state):
    page.open("one", **state)
    page.click("reset") if page.find("reset").is_enabled() else None
    assert len(page.losses()[0]) == 1


def test_markup_in_a_text_or_an_address_is_text(page):
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    page.open("one", text=hostile, other=hostile, edits0=json.dumps({"mask": hostile, "heads": {hostile: "off"}}))
    assert page.find("text").get_attribute("value") == hostile
    for view in VIEWS:
        page.click(f"tab-{view}")
        assert page.js("return document.title") == "one"
        assert page.js("return document.querySelectorAll('#app img, #app script').length") == 0


def test_two_runs_read_the_same_text(page, runs):
    text = make_text(0, 40)[:128]
    page.open("two")
    wanted = [losses_of(run.model, text).mean() for run in runs]
    assert page.losses() == [[pytest.approx(loss, abs=LIMIT)] for loss in wanted]
    assert page.find("tab-loss").get_attribute("aria-selected") == "true"
    assert "trained context ends: 32" in page.find("loss-chart").get_attribute("textContent")
    beyond = page.js("return [...document.querySelectorAll('.paint .beyond')].map((span) => +span.dataset.last)")
    assert min(beyond) == 32
    page.click("run-1").click("head-1.2")
    edited = losses_of(without_head(runs[1].model, 1, 2), text).mean()
    assert page.losses()[0] == [pytest.approx(wanted[0], abs=LIMIT)]
    assert page.losses()[1] == [pytest.approx(wanted[1], abs=LIMIT), pytest.approx(edited, abs=LIMIT)]


def test_writing_on_is_greedy_at_temperature_zero(page, runs):
    page.open("one", temperature=0, count=6)
    page.click("write")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    tokens = ByteTokenizer().encode(TEXT).tolist()
    for _ in range(6):
        tokens.append(int(np.asarray(runs[0].model.logits(np.array([tokens], np.int32)))[0, -1].argmax()))
    page.settle()
    assert page.find("text").get_attribute("value") == ByteTokenizer().decode(tokens).replace("\r", "\n")


def test_writing_on_repeats_with_a_seed_and_stops(page):
    texts = []
    for seed in (1, 1, 2):
        page.open("one", seed=seed, count=20).click("write")
        page.wait(lambda: page.js("return !document.getElementById('stop')"))
        texts.append(page.settle().find("text").get_attribute("value"))
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(TEXT)
    page.open("one", count=480).js("document.getElementById('write').click()")
    page.wait(
        lambda: page.js("return document.getElementById('stop')") and len(page.find("text").get_attribute("value")) > 30
    )
    page.js(
        "const { send } = engines; window.sent = []; engines.send = (...all) => { sent.push(all[0]); send(...all); };"
    )
    page.click("stop")
    assert {"kind": "cancel", "model": 0, "slot": "generated"} in page.js("return sent")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    size = len(page.settle().find("text").get_attribute("value"))
    assert size <= len(TEXT) + 480
    page.settle()
    assert len(page.find("text").get_attribute("value")) == size


def test_writing_ends_with_the_separator(page):
    page.open("words", temperature=2, topK=0, count=400).click("write")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    assert "ends the text" in page.settle().find("writer-message").text
    assert page.find("text").get_attribute("value").startswith("the cat sat")


def test_a_chosen_bar_is_appended(page):
    page.open("one")
    token = page.js("const bar = document.querySelector('#next-0 button'); bar.click(); return +bar.dataset.token")
    assert page.settle().find("text").get_attribute("value") == TEXT + ByteTokenizer().decode([token]).replace(
        "\r", "\n"
    )


def test_the_cursor_chooses_the_place(page):
    page.open("one")
    field = page.find("text")
    field.click()
    field.send_keys(Keys.CONTROL, Keys.HOME)
    field.send_keys(*[Keys.ARROW_RIGHT] * 7)
    page.settle()
    assert page.state["pin"] == "6" and "the cat" in page.browser.find_element(By.CSS_SELECTOR, ".after").text
    actual = page.js("return [...document.querySelectorAll('#next-0 .actual')].map((bar) => +bar.dataset.token)")
    assert set(actual) <= {ord(" ")}


def test_typing_shows_the_end_also_under_a_resting_mouse(page):
    page.open("one")
    field, after = page.find("text"), page.browser.find_element(By.CSS_SELECTOR, ".after q")
    ActionChains(page.browser).move_to_element_with_offset(field, 30 - field.size["width"] // 2, -50).perform()
    assert len(page.settle() and after.text) < 5  # the place under the mouse
    page.js("arguments[0].focus(); arguments[0].setSelectionRange(999, 999)", field)
    ActionChains(page.browser).send_keys("!").perform()
    assert page.settle() and after.text.endswith("mat!")


def test_a_head_takes_its_output_from_another_text(page):
    page.open("one", other=TEXT.replace("mat", "dog"), edits0=json.dumps({"heads": {"1.0": "patch"}}))
    assert "Head 1.0 from the other text" in page.said and len(page.losses()[0]) == 2
    plain, patched = page.losses()[0]
    assert abs(plain - patched) > 1e-4
    page.open("one", other=TEXT, edits0=json.dumps({"heads": {"1.0": "patch"}}))
    plain, patched = page.losses()[0]
    assert patched == pytest.approx(plain, abs=1e-6)
    page.open("one", other="shorter", edits0=json.dumps({"heads": {"1.0": "patch"}}))
    assert "Patching needs equal numbers" in page.find("other-count").text and len(page.losses()[0]) == 1


def test_a_table_of_positions_that_ends_is_said(page):
    page.open("learned", edits0=json.dumps({"start": 20}))
    assert "The learned table has 32 positions" in page.said
    page.click("reset")
    assert len(page.losses()[0]) == 1
    page.write("a" * 40)
    assert "The learned table has 32 positions" in page.said
    page.write("a" * 30)
    assert len(page.losses()[0]) == 1


def test_an_empty_text_is_said(page):
    page.open("one").write(Keys.BACKSPACE)
    assert "at least one token" in page.said
    page.write("ab")
    assert len(page.losses()[0]) == 1


def test_fast_typing_ends_with_the_last_text(page, runs):
    text = make_text(3, 12)
    page.open("one").write(text)
    assert page.losses() == [[pytest.approx(losses_of(runs[0].model, text).mean(), abs=LIMIT)]]


def test_every_control_is_reached_by_the_keyboard(page):
    page.open("one")
    reached = set()
    for _ in range(90):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        reached.add(page.js("return document.activeElement.id || document.activeElement.className"))
    wanted = {
        "text",
        "write",
        "head-0.0",
        "head-1.3",
        "attentions-1",
        "scale-off",
        "mask-none",
        "rope-base",
        "start",
        "other",
    }
    assert wanted <= reached and "tab-attention" in reached
    page.js("document.getElementById('head-1.2').focus()")
    ActionChains(page.browser).send_keys(Keys.SPACE).perform()
    assert "Head 1.2 off" in page.settle().said
    page.js("document.getElementById('tab-attention').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert page.settle().find("tab-map").get_attribute("aria-selected") == "true"


def test_a_picture_shows_the_page(page):
    page.open("one", view="map", theme="light", edits0=json.dumps({"heads": {"0.1": "off"}}))
    script = """const [done] = arguments, reader = new FileReader();
        reader.onload = () => done(reader.result);
        const picture = pictureOf(document.querySelector("main"));
        picture.then((blob) => reader.readAsDataURL(blob), (error) => done(error + ""));"""
    kind, _, data = page.browser.execute_async_script(script).partition(",")
    assert kind == "data:image/png;base64"
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), int)
    height, width, _ = picture.shape
    assert width > 800 and height > 800
    paper, blue = np.abs(picture - [252, 252, 250]).sum(-1) < 4, np.abs(picture - [47, 95, 208]).sum(-1) < 40
    assert 0.2 < paper.mean() < 0.99 and blue.sum() > 1000  # the bars
    dark_text = (picture.sum(-1) < 150)[: height // 3].sum()
    assert dark_text > 500


def test_texts_of_a_picture_are_in_their_fields(page):
    page.open("one", other="the dog sat on the mat")
    script = """const sheet = document.createElement("div");
        sheet.className = "sheet";
        sheet.append(frozen(document.querySelector("main")));
        document.body.append(sheet);
        const sides = ({ left, right, top, bottom }) => [left, -right, top, -bottom];
        const box = (element) => sides(element.getBoundingClientRect());
        const found = (field) => [field.textContent, box(field), box(field.parentElement)];
        return [...sheet.querySelectorAll(".field")].map(found);"""
    fields = page.js(script)
    assert [text for text, *_ in fields] == [TEXT, "the dog sat on the mat"]
    for _, inner, outer in fields:
        assert all(near >= far for near, far in zip(inner, outer, strict=True))


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page, width, theme):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    edits = {"heads": {"1.2": "off", "0.1": "mean"}, "layers": [0]}
    try:
        for name, views in (("one", VIEWS), ("two", VIEWS[:3])):
            for view in views:
                page.open(name, view=view, theme=theme, pin=9, edits0=json.dumps(edits), colours="difference")
                assert chromium.axe_violations(page.browser) == [], (name, view)
                assert page.js("return document.documentElement.scrollWidth <= innerWidth"), (name, view)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_selected_tab_is_visible_on_a_phone(page):
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for view in VIEWS:
            box = page.open("one", view=view).find(f"tab-{view}").rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, view
            assert page.js("return scrollY") == 0
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_typing_while_the_model_writes_ends_the_writing(page):
    page.open("one", count=480).js("document.getElementById('write').click()")
    page.wait(lambda: len(page.find("text").get_attribute("value")) > 30)
    page.find("text").send_keys("typed")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    text = page.settle().find("text").get_attribute("value")
    assert "typed" in text
    page.settle()
    assert page.find("text").get_attribute("value") == text


def test_a_refused_writing_is_said(page):
    page.open("learned", count=2000).write("a" * 30).click("write")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    assert "The learned table has 32 positions" in page.find("writer-message").text
    assert page.settle().find("text").get_attribute("value").startswith("a" * 30)
    page.write("b")
    assert page.find("writer-message").text == ""


def test_controls_have_the_limits_and_values_of_the_run(page):
    page.open("ssmax")
    assert page.js("return [...document.querySelectorAll('[id^=mask-]')].map((e) => e.id)") == [
        "mask-causal",
        "mask-none",
    ]
    assert page.find("window-value").text == "5 keys"
    page.open("ssmax", edits0='{"mask":"shifted"}')
    assert "The mask can't be shifted" in page.said
    page.click("reset")
    assert len(page.losses()[0]) == 1


def move(page, name, step):
    """Move a slider to a step of its scale."""
    script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
    page.js(script + "e.dispatchEvent(new Event('input', { bubbles: true }))", name, step)
    return page.settle()


def test_a_slider_returns_to_the_value_of_the_run(page):
    page.open("ssmax")
    own = page.js("return +document.getElementById('window').value")
    assert "Window of 1:" in move(page, "window", 0).said
    assert "No window:" in move(page, "window", 120).said
    move(page, "window", own)
    assert len(page.losses()[0]) == 1 and "edits0" not in page.state


def test_a_number_out_of_range_becomes_the_nearest(page):
    page.open("one", count="9999", topK="2.6")
    assert [page.find(name).get_attribute("value") for name in ("count", "topK")] == ["2000", "3"]
    page.find("count").send_keys(Keys.CONTROL, "a")
    page.find("count").send_keys("0", Keys.TAB)
    assert page.settle().find("count").get_attribute("value") == "1"


def test_an_empty_text_is_asked_for_in_every_part(page):
    page.open("two", view="loss")
    page.find("text").send_keys(Keys.CONTROL, "a")
    page.find("text").send_keys(Keys.BACKSPACE)
    page.settle()
    assert not page.find("write").is_enabled()
    assert page.find("panel").text == "Type a text: the model needs at least one token."
    assert "append" not in page.js("return document.querySelector('[aria-labelledby=next-title]').textContent")


@pytest.mark.parametrize(("start", "end", "place"), [(0, 0, 0), (4, 7, 6), (9, 9, 8)])
def test_next_token_follows_the_cursor_or_what_is_selected(page, start, end, place):
    page.open("one").find("text").click()
    page.js("document.getElementById('text').setSelectionRange(arguments[0], arguments[1])", start, end)
    page.wait(lambda: page.settle().state.get("pin") == str(place))
    before = page.js("return document.querySelector('.after q').textContent")
    assert before == TEXT[: place + 1][-12:]


@pytest.mark.parametrize("letters", [33, 34])
def test_the_loss_of_a_short_text_is_not_smoothed(page, letters):
    page.open("one", view="loss", text="a" * letters)
    text = page.find("panel").text
    assert ("the loss of each token" in text) is (letters < 34)
    assert ("the mean over the 33 tokens" in text) is (letters >= 34)


@pytest.mark.parametrize("steps", [(7, 7), (7, 9)])
def test_different_steps_of_two_runs_are_said(page, pages, runs, steps):
    stepped = [run._replace(step=step) for run, step in zip(runs, steps, strict=True)]
    (pages / "steps.html").write_text(playground.play(stepped, ByteTokenizer(), TEXT, title="steps"), encoding="utf-8")
    page.open("steps")
    said = page.js("return document.getElementById('steps')?.textContent ?? ''")
    assert ("one at 7, two at 9" in said) is (steps == (7, 9))
    assert bool(said) is (steps == (7, 9))


def test_the_place_of_the_lens_is_in_view_on_a_narrow_screen(page):
    window = page.browser.get_window_size()
    try:
        page.browser.set_window_size(500, 900)
        page.open("one", view="lens")
        page.wait(lambda: page.js("return document.querySelector('.lens .here')"))
        read = (
            "const {left, right} = document.querySelector(arguments[0]).getBoundingClientRect(); return [left, right]"
        )
        (left, right), (first, last) = page.js(read, ".scroll"), page.js(read, ".lens .here")
        assert left <= first < last <= right
        assert page.js("return document.querySelectorAll('.lens .here, .lens th button').length") == 14
    finally:
        page.browser.set_window_size(window["width"], window["height"])
