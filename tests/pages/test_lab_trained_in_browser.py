"""A trained head in the lab in Chromium: wide matrices are maps, and a changed cell changes the weights."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt.pages.lab import page
from tests.pages.browser import axe_violations, screen, show
from tests.pages.test_explorer_in_node import made
from tests.pages.test_lab_trained import held

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("lab") / "lab.html"
    data = held(made(model__position="rope")) | {"title": "layer 1, head 2"}
    target.write_text(page.lab(data), encoding="utf-8")
    return target


def weight(browser):
    return browser.execute_script("return document.querySelector('#said-0').textContent")


def test_a_cell_of_a_map_can_be_changed_by_keyboard(browser, path):
    show(browser, path)
    before = weight(browser)
    box = browser.find_element(By.CSS_SELECTOR, "#matrix-WK .map")
    box.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    field = browser.find_element(By.CSS_SELECTOR, "#matrix-WK p input")
    assert field.get_attribute("aria-label") == "W_K, 1, 1"
    field.send_keys(Keys.CONTROL + "a" + Keys.NULL, "90", Keys.TAB)
    WebDriverWait(browser, 10).until(lambda _: "K=1%2C1%2C90" in browser.current_url)
    assert weight(browser) != before
    browser.find_element(By.ID, "reset").click()
    WebDriverWait(browser, 10).until(lambda _: weight(browser) == before)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width, theme", [(1200, "light"), (390, "dark")])
def test_axe_finds_nothing(browser, path, width, theme):
    browser.set_script_timeout(120)
    with screen(browser, width, theme):
        browser.get("about:blank")
        show(browser, path)
        for section in browser.find_elements(By.CSS_SELECTOR, "summary")[1:]:
            section.click()
        assert axe_violations(browser) == []
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
