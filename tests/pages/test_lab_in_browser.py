"""The lab in headless Chromium: numbers that follow each change, explanations, order, copies and access."""

import math

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from mini_gpt.commands import lab
from mini_gpt.pages.lab import example
from tests.oracle import softmax
from tests.pages.browser import axe_violations, show

pytestmark = pytest.mark.slow
SENTENCE, X_LD = next(iter(example.SENTENCES.items()))
WORDS = SENTENCE.split()
ALL = Keys.CONTROL + "a" + Keys.NULL  # selects the text of a field


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Write the page with the command, and return its path."""
    target = tmp_path_factory.mktemp("lab") / "lab.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lab", f"--out={target}"])
        lab.main()
    return target


@pytest.fixture
def page(browser, path):
    """Open the page as it starts."""
    browser.set_script_timeout(120)  # axe-core reads a thousand cells
    browser.get("about:blank")
    show(browser, path)
    yield browser
    assert browser.get_log("browser") == []


def find(browser, name):
    return browser.find_element("id", name)


def cell(browser, matrix, i, j):
    rows = browser.find_elements("css selector", f"#matrix-{matrix} tbody tr")
    return rows[i].find_elements("css selector", "[role=gridcell]")[j]


def values(browser, matrix):
    """Return the numbers of a matrix; NaN where a key is hidden."""
    script = """return [...document.querySelectorAll(`#matrix-${arguments[0]} tbody tr`)].map((row) =>
        [...row.querySelectorAll("[role=gridcell]")].map((cell) => cell.dataset.value))"""
    return np.array([[float(value) for value in row] for row in browser.execute_script(script, matrix)])


def until(browser, condition):
    return WebDriverWait(browser, 10).until(lambda _: condition())


def resize(page, request, width):
    """Set the width of the window until the end of the test."""
    request.addfinalizer(lambda: page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {}))
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def unfold(page):
    """Open all sections of a narrow screen."""
    page.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 0))")


def test_the_page_opens_offline_and_shows_the_claimed_pairs(page):
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    keys_LD = X_LD[:, [1, 0, 3, 2]]
    for head in range(2):
        half = slice(2 * head, 2 * head + 2)
        logits_LS = X_LD[:, half] @ keys_LD[:, half].T / math.sqrt(2)
        np.testing.assert_allclose(values(page, f"S{head}"), logits_LS, rtol=1e-6)
        np.testing.assert_allclose(values(page, f"A{head}"), softmax(logits_LS), rtol=1e-6)
        out_LK = softmax(logits_LS) @ X_LD[:, half]
        np.testing.assert_allclose(values(page, "Y")[:, half], out_LK, rtol=1e-6)
    assert find(page, "said-0").text.startswith("cat → sat 0.77, sat → cat 0.74")
    assert "the → mat 0.77" in find(page, "said-1").text
    assert find(page, "two-roles").text.startswith("“sat” finds cat 0.74 in head 1, and mat 0.45 in head 2.")


def test_an_edited_cell_changes_the_steps_and_the_address(page):
    field = cell(page, "WQ", 0, 0).find_element("tag name", "input")
    field.send_keys(ALL, "-0,5")
    until(page, lambda: values(page, "Q")[1, 0] == -1)
    assert field.get_property("value") == "-0,5"
    assert Select(find(page, "preset-Q")).first_selected_option.text == "edited"
    field.send_keys("x")
    until(page, lambda: field.get_attribute("aria-invalid") == "true")
    assert values(page, "Q")[1, 0] == -1  # what is not a number changes nothing
    for text, is_invalid in (("200", "false"), ("2000", "true"), ("-0,5", "false")):
        field.send_keys(ALL, text)
        until(page, lambda is_invalid=is_invalid: field.get_attribute("aria-invalid") == is_invalid)
    field.send_keys(Keys.DOWN)
    until(page, lambda: field.get_property("value") == "-0.5")
    assert page.switch_to.active_element == cell(page, "WQ", 1, 0).find_element("tag name", "input")
    word = cell(page, "X", 3, 1).find_element("tag name", "input")
    word.send_keys(ALL, "3")
    Select(find(page, "position")).select_by_value("rope")
    until(page, lambda: "position=rope" in page.current_url)
    changed = {name: values(page, name) for name in ("X", "Q", "S0", "A1", "Y")}
    page.refresh()
    until(page, lambda: page.find_elements("id", "matrix-Y"))
    for name, numbers in changed.items():
        np.testing.assert_array_equal(values(page, name), numbers)
    find(page, "reset").click()
    until(page, lambda: page.current_url.endswith("#"))
    np.testing.assert_array_equal(values(page, "X"), X_LD)


def test_presets_and_seeds_change_a_matrix(page):
    select = Select(find(page, "preset-V"))
    assert [option.text for option in select.options] == [*example.PRESETS, "random"]
    for name, w_DE in example.PRESETS.items():
        select.select_by_visible_text(name)
        until(page, lambda w_DE=w_DE: np.array_equal(values(page, "WV"), w_DE))
        np.testing.assert_allclose(values(page, "V"), X_LD @ w_DE)
    select.select_by_visible_text("random")
    until(page, lambda: values(page, "WV").any())
    first = values(page, "WV")
    find(page, "seed-V").send_keys(ALL, "42")
    until(page, lambda: "V=random.42" in page.current_url)
    assert not np.array_equal(values(page, "WV"), first)


def test_scale_and_temperature_change_the_weights(page):
    logits_LS = X_LD[:, :2] @ X_LD[:, [1, 0]].T
    find(page, "scale-off").click()
    until(page, lambda: np.allclose(values(page, "S0"), logits_LS))
    np.testing.assert_allclose(values(page, "A0"), softmax(logits_LS), rtol=1e-6)
    set_value = "arguments[0].value = 2.5; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    page.execute_script(set_value, find(page, "temperature"))
    until(page, lambda: find(page, "temperature-value").text == "2.5")
    np.testing.assert_allclose(values(page, "S0"), logits_LS, rtol=1e-6)
    np.testing.assert_allclose(values(page, "A0"), softmax(logits_LS / 2.5), rtol=1e-6)


def test_a_number_is_explained_by_mouse_and_keys(page):
    explained = lambda: find(page, "explained").text
    sources = lambda: {
        page.execute_script("return arguments[0].closest('figure').id", element)
        for element in page.find_elements("css selector", ".matrix td.source")
    }
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell(page, "S0", 2, 1))
    ActionChains(page).move_to_element(cell(page, "S0", 2, 1)).perform()
    until(page, lambda: explained() == "S₁[sat, cat] (0.00·0.00 + 2.00·2.00) / √2 = 2.83")
    assert sources() == {"matrix-Q0", "matrix-K0"}
    target = cell(page, "A0", 2, 0)
    page.execute_script("arguments[0].focus()", target)
    ActionChains(page).move_to_element(find(page, "title-step-score")).send_keys(Keys.RIGHT).perform()
    until(page, lambda: explained().startswith("A₁[sat, cat] exp(2.83) / (1.00 + 16.9 +"))
    assert page.switch_to.active_element == cell(page, "A0", 2, 1) and sources() == {"matrix-S0"}
    ActionChains(page).send_keys(Keys.DOWN).perform()
    until(page, lambda: explained().startswith("A₁[on, cat]"))
    page.execute_script("arguments[0].focus()", cell(page, "one-A0", 2, 1))
    until(page, lambda: explained().startswith("A₁[sat, cat] exp(2.00) / (1.00 + 7.39 +"))
    find(page, "mask-causal").click()
    page.execute_script("arguments[0].focus()", cell(page, "S0", 2, 5))
    until(page, lambda: explained() == "S₁[sat, mat] hidden by the causal mask: mat comes after sat")
    assert np.isneginf(values(page, "S0")[2, 5]) and values(page, "A0")[2, 5] == 0


def test_each_matrix_is_one_tab_stop(page):
    stops = page.execute_script("""return [...document.querySelectorAll('.matrix')].map((figure) =>
        figure.querySelectorAll('td[tabindex="0"], input[tabindex="0"]').length)""")
    assert len(stops) > 20 and set(stops) == {1}


def test_words_are_reordered_by_buttons_and_by_drag(page):
    words = lambda: [chip.text for chip in page.find_elements("css selector", ".chip .grip")]
    before = values(page, "Y")
    button = page.find_element("css selector", "[aria-label='Move cat, word 2, to the right']")
    button.send_keys(Keys.ENTER)
    until(page, lambda: words() == ["The", "sat", "cat", "on", "the", "mat"])
    assert page.switch_to.active_element.accessible_name == "Move cat, word 3, to the right"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until(page, lambda: words() == ["The", "sat", "on", "cat", "the", "mat"])
    np.testing.assert_allclose(values(page, "Y"), before[[0, 2, 3, 1, 4, 5]], rtol=1e-12)
    assert find(page, "verdict").text.startswith("Each word has the same output as before; only the rows are permuted.")
    np.testing.assert_array_equal(values(page, "before-Y"), before)
    np.testing.assert_array_equal(values(page, "after-Y"), values(page, "Y"))
    for kind in ("mouse", "touch"):
        grips = page.find_elements("css selector", ".chip .grip")
        last = grips[5].text
        actions = ActionChains(page, devices=[PointerInput(kind, kind)])
        actions.drag_and_drop(grips[5], grips[0]).perform()
        until(page, lambda last=last: words()[0] == last)
        assert sorted(words()) == sorted(WORDS) and not page.find_elements("css selector", ".dragged")
    Select(find(page, "position")).select_by_visible_text("ALiBi")
    until(page, lambda: "because of ALiBi: the order matters" in find(page, "verdict").text)
    find(page, "original").click()
    until(page, lambda: words() == WORDS)


def test_a_link_brings_its_result_into_view(page):
    page.find_element("link text", "Swap “The” and “mat”").click()
    shown = "const { top } = arguments[0].getBoundingClientRect(); return top >= 0 && top < innerHeight"
    until(page, lambda: page.execute_script(shown, find(page, "verdict")))
    assert find(page, "verdict").text.startswith("Each word has the same output as before")
    assert page.switch_to.active_element == find(page, "reorder")
    page.find_element("link text", "The same swap with RoPE").click()
    until(page, lambda: "because of RoPE" in find(page, "verdict").text)
    marked = lambda: [link.text for link in page.find_elements("css selector", "#experiments [aria-current=true]")]
    assert marked() == ["The same swap with RoPE"]
    find(page, "mask-causal").click()
    until(page, lambda: marked() == [])


def test_sections_fold_on_a_narrow_screen(page, request, path):
    resize(page, request, 390)
    page.get("about:blank")
    page.get(f"{path.as_uri()}#step-score")
    opened = lambda: [e.get_attribute("id") for e in page.find_elements("css selector", ".step:has(> [open])")]
    top = lambda name: page.execute_script("return arguments[0].getBoundingClientRect().top", find(page, name))
    until(page, lambda: opened() == ["roles", "step-score"] and 0 <= top("step-score") < 450)
    assert page.switch_to.active_element == find(page, "step-score")
    height = page.execute_script("return document.documentElement.scrollHeight")
    page.execute_script("arguments[0].focus()", page.find_element("css selector", "#step-mix summary"))
    for key, names in ((Keys.ENTER, ["roles", "step-score", "step-mix"]), (Keys.SPACE, ["roles", "step-score"])):
        ActionChains(page).send_keys(key).perform()
        until(page, lambda names=names: opened() == names)
    page.find_element("link text", "Use one head").click()
    until(page, lambda: opened()[2:] == ["one-beside-two"] and 0 <= top("one-beside-two") < 450)
    page.execute_script("location.hash = 'shapes'")
    until(page, lambda: opened()[2:] == ["shapes", "one-beside-two"] and 0 <= top("shapes") < 450)
    assert find(page, "unread").text == ""
    unfold(page)
    assert len(opened()) == 10 and page.execute_script("return document.documentElement.scrollHeight") > 2 * height


def test_a_step_is_copied_as_numpy(page):
    page.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    page.find_element("css selector", "#step-mix [aria-label='Copy Softmax, times V as NumPy']").click()
    until(page, lambda: find(page, "explained").text == "Softmax, times V copied as NumPy.")
    copied = {}
    exec(page.execute_async_script("navigator.clipboard.readText().then(arguments[0])"), copied)
    np.testing.assert_array_equal(copied["A_2"], values(page, "A1"))
    np.testing.assert_array_equal(copied["O_1"], values(page, "O0"))


def test_nothing_is_wider_than_the_window(page, request, path):
    numbers = "&".join(f"{letter}=random.{seed}" for seed, letter in enumerate("QKVO"))
    for fragment in (numbers, f"{numbers}&heads=1&position=sinusoidal", "mask=causal&position=hard_alibi"):
        page.get("about:blank")
        page.get(f"{path.as_uri()}#{fragment}")
        until(page, lambda: page.find_elements("id", "matrix-Y"))
        for width in (320, 390, 600, 768, 1024, 1240, 1319, 1340, 1920):
            resize(page, request, width)
            unfold(page)
            found = page.execute_script("""const root = document.documentElement;
                const right = (element) => element.getBoundingClientRect().right;
                const matrices = [...document.querySelectorAll(".matrix")];
                const beyond = matrices.map((matrix) => right(matrix) - right(matrix.closest(".card")));
                return Math.max(root.scrollWidth - root.clientWidth, ...beyond)""")
            assert found <= 0, (fragment, width)


def test_controls_are_large_enough_for_fingers(page, request, path):
    request.addfinalizer(lambda: page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {}))
    request.addfinalizer(lambda: page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False}))
    metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    page.get("about:blank")
    page.get(f"{path.as_uri()}#Q=random.3&position=sinusoidal")
    until(page, lambda: page.find_elements("id", "matrix-P"))
    unfold(page)
    small = page.execute_script("""const small = (selector, side) => [...document.querySelectorAll(selector)].filter(
            (e) => side.some((name) => e.getBoundingClientRect()[name] < 39.5)).map((e) => e.outerHTML.slice(0, 80));
        return [...small("button, select, summary, #temperature, .picker input", ["width", "height"]),
            ...small("[role=gridcell]", ["height"]), ...small("#experiments a", ["height"])]""")
    assert small == []
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_accessible(page, request, path, width, theme):
    resize(page, request, width)
    page.get(f"{path.as_uri()}#theme={theme}&position=sinusoidal&mask=causal&Q=random.3&O=negated")
    until(page, lambda: page.find_elements("id", "matrix-P"))
    until(page, lambda: page.execute_script("return document.getAnimations().length === 0"))  # colours have settled
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert axe_violations(page) == []
    unfold(page)
    assert axe_violations(page) == []
