"""Edits and patches in Chromium change the loss as in the model, and controls have the values of the run."""

import json

import pytest
from selenium.webdriver.common.by import By

from tests.pages.play_in_browser.play_page import LIMIT, TEXT, losses_of, without_head

pytestmark = pytest.mark.slow


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
