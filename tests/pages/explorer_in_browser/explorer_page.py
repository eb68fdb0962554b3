"""The texts of the explorer's pages, and how a test opens a page in Chromium and finds the cells of its map."""

from pathlib import Path

from selenium.webdriver.support.ui import WebDriverWait

TEXT = "def main(x):\n\treturn  x + 1\n"
STORIES = "The women find a horse that the king follows. She is polite.", "Two boxes break."


def go(browser, path: Path, fragment: str) -> None:
    browser.get("about:blank")
    browser.get(f"{path.as_uri()}#{fragment}")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 0))")  # maps know their width


def plot(browser) -> dict[str, float]:
    script = """const c = document.getElementById('map'), b = c.getBoundingClientRect();
        return {...c.dataset, left_: b.left, top_: b.top};"""
    return {name: float(value) for name, value in browser.execute_script(script).items()}
