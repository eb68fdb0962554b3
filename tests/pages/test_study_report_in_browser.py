"""The report of a study in Chromium: one centred column, with figures and tables as wide as the text."""

import pytest

from mini_gpt.insight import curves
from mini_gpt.study import report
from tests.pages.browser import axe_violations, screen

TEXT = """# A question

## Verdicts

| claim | verdict |
|---|---|
| a lower than b | **shown** |

| {columns} |
|{rules}
| {columns} |

A sentence that is longer than the column. {words}

![A figure](figure.png)
"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1800, 1280, 390])
def test_text_figures_and_tables_are_one_centred_column(browser, tmp_path, width, theme):
    figure, _ = curves.new_figure((5, 3))
    figure.savefig(tmp_path / "figure.png", dpi=130)
    text = TEXT.format(words="words " * 100, columns=" | ".join(["a_long_column"] * 5), rules="---|" * 5)
    page = report._page("A question", text, tmp_path)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    with screen(browser, width, theme):
        browser.get((tmp_path / "report.html").as_uri())
        script = """return [...document.querySelectorAll('h2, p, .wide, img')].map((element) => {
            const {left, right} = element.getBoundingClientRect();
            return [left, document.documentElement.clientWidth - right]; })"""
        sides = browser.execute_script(script)
        assert len(sides) == 6 and all(side == pytest.approx(sides[0], abs=1) for side in sides), sides
        assert sides[0][0] == pytest.approx(sides[0][1], abs=1)
        script = (
            "return [...document.querySelectorAll('table')].map((e) => e.offsetWidth - e.parentElement.clientWidth)"
        )
        short, wide = browser.execute_script(script)
        assert short == 0 and (wide > 0) == (width == 390), "only a table that is too wide scrolls"
        assert axe_violations(browser) == []
