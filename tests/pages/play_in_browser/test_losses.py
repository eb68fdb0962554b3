"""The losses of a typed text, of a selected part and of an answer in Chromium are the model's."""

import pytest

from mini_gpt.data.subwords import BpeTokenizer
from tests.conftest import make_text
from tests.pages.play_in_browser.play_page import COPY, LETTERS, LIMIT, TEXT, losses_of, without_head
from tests.pages.test_play import shown

pytestmark = pytest.mark.slow


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
