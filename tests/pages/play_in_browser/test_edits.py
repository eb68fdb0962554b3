"""Edits and patches in Chromium change the loss as in the model, and controls have the values of the run."""

import json

import pytest
from selenium.webdriver.common.by import By

from tests.pages.play_in_browser.play_page import LIMIT, TEXT, losses_of, without_head

pytestmark = pytest.mark.slow


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
    page.click("head-0.3")
    assert "python -m mini_gpt.prune --workdir=RUN --heads=1.2,0.3 --output=DIR" in page.find("prune").text
    page.click("reset")
    assert page.losses() == [[pytest.approx(plain, abs=LIMIT)]] and not page.js(
        "return document.getElementById('prune')"
    )


def test_measured_heads_show_the_change_of_the_loss(page, runs):
    page.open("one").click("measure")
    page.wait(lambda: not page.find("measure").get_attribute("disabled"))
    plain = losses_of(runs[0].model, TEXT).mean()
    for layer, head in ((0, 0), (1, 3)):
        change = losses_of(without_head(runs[0].model, layer, head), TEXT).mean() - plain
        label = page.find(f"head-{layer}.{head}").get_attribute("aria-label")
        assert f"changes the loss by {change:+.3f} nats".replace("-", "−") in label


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


def test_changes_are_those_of_the_selected_part(page):
    rows = "return [...document.querySelectorAll('.history tbody td')].map((cell) => cell.textContent)"
    select = """const field = document.getElementById("text"); field.focus(); field.setSelectionRange(...arguments);
        field.dispatchEvent(new Event("select", { bubbles: true }));"""
    move(page.open("one"), "attention-temperature", 90)
    assert page.js(rows)[0] == "Attention temperature 3.2"
    page.js(select, 4, 7)
    assert page.settle().js(rows) == ["Switch off a head, or move a slider."]
    before = page.losses()[0][1]
    move(page, "attention-temperature", 110)
    assert page.js(rows)[1:3] == [f"{loss:.3f}" for loss in (before, page.losses()[0][1])]


def test_the_place_of_a_patch_is_that_of_the_edit(page):
    edits = {"heads": {"1.0": "patch"}, "places": [3]}
    page.open("one", pin=5, other=TEXT.replace("mat", "dog"), edits0=json.dumps(edits))
    assert page.find("places-some").text == "place 3 only"
    page.click("places-all")
    assert page.find("places-some").text == "place 5 only"


def test_the_page_is_busy_from_the_moment_of_a_change(page):
    busy_after = """const done = arguments[1]; document.getElementById(arguments[0]).click();
        Promise.resolve().then(() => done(document.documentElement.dataset.busy));"""
    page.open("ssmax", edits0='{"mask":"shifted"}', view="loss")
    assert page.browser.execute_async_script(busy_after, "tab-lens") == "no"
    assert page.browser.execute_async_script(busy_after, "reset") == "yes"
    for name, expected in (("tab-loss", "no"), ("tab-lens", "no"), ("mask-none", "yes")):
        assert page.settle().browser.execute_async_script(busy_after, name) == expected
    page.open("ssmax", view="loss")
    assert page.browser.execute_async_script(busy_after, "tab-lens") == "yes"


def test_a_change_is_in_the_table_as_soon_as_its_loss_is_there(page):
    page.open("one")
    script = """const done = arguments[0], root = document.documentElement;
        const read = () => done(document.querySelector('.history tbody td').textContent);
        new MutationObserver(() => root.dataset.busy === "no" && setTimeout(read)).observe(root, { attributes: true });
        document.getElementById("head-1.2").click();"""
    assert page.browser.execute_async_script(script) == "Head 1.2 off"
