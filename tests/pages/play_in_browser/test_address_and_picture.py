"""The address restores the page in Chromium, markup in it stays text, and a picture shows the page."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from tests.pages.play_in_browser.play_page import TEXT, VIEWS

pytestmark = pytest.mark.slow


def test_the_address_restores_text_edits_and_view(page):
    edits = {"heads": {"0.3": "mean"}, "layers": [1], "scale": "off", "start": 500, "rope": {"base": 100}, "window": 5}
    page.open("one").write("other text")
    state = {"edits0": json.dumps(edits), "view": "lens", "unit": "bits", "theme": "dark", "pin": 4}
    page.open("one", **page.state | state)
    assert page.find("text").get_attribute("value") == "other text"
    phrases = ("0.3 at its mean", "layer 1 off", "no division", "window of 5", "positions from 500", "RoPE base 100")
    assert all(phrase in page.said for phrase in phrases) and "bits per token" in page.said
    assert page.find("tab-lens").get_attribute("aria-selected") == "true"
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    assert json.loads(page.state["edits0"]) == edits and page.state["pin"] == "4"


def test_an_empty_text_stays_empty(page):
    page.open("words")
    for name in ("text", "other"):
        page.find(name).send_keys(Keys.CONTROL, "a")
        page.find(name).send_keys(Keys.DELETE)
    page.settle()
    for _ in ("as typed", "from the address"):
        assert page.state["text"] == page.state["other"] == ""
        assert [page.find(name).get_attribute("value") for name in ("text", "other")] == ["", ""]
        assert page.said == "Type a text: the model needs at least one token."
        assert not page.find("write").is_enabled()
        page.open("words", **page.state)
    page.open("words")
    assert [page.find(name).get_attribute("value") for name in ("text", "other")] == ["the cat sat", "the dog ran"]


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
    assert (picture.sum(-1) < 150)[: height // 3].sum() > 500


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
