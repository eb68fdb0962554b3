"""Measure how fast the playground answers a keystroke, in headless Chromium on one core.

python -m benchmarks.play_latency [--layers=4 --width=128 --tokens=128 --position=rope --rounds=30]

The model has random parameters, and bytes as tokens. Prints median, 95th percentile and largest latency, first of the
page: from the event of a key or a click to the first frame with the new results. A browser draws a frame each 17 ms.
  append, middle, edit   as below
  frames                 the longest time between two frames, in each round

Then of the worker alone: from the page's message to the reply, with the eight most likely next tokens at all places,
and with the logit lens.
  open      the first text after the page is opened, once
  append    one more token at the end: the rest comes from the cache
  middle    another token in the middle of the text
  first     another first token: nothing comes from the cache
  edit      a head is switched off, or on again: nothing comes from the cache
  cancel    a run is cancelled: the longest time for which the worker did not read its messages
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import play_worker
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.pages.play import page as playground
from tests.pages import browser as chromium
from tests.random_models import random_model

WORKER = """
const [tokens, vocabulary, rounds, done] = arguments, draw = () => Math.floor(Math.random() * vocabulary);
const run = (text, edits = {}) => ask({ kind: "run", model: 0, tokens: text, edits, ask: { top: 8, lens: 3 } });
const changed = (place) => tokens.map((token, n) => (n === place ? draw() : token));
(async () => {
  const found = { open: [(await run(tokens))[0].delay], append: [], middle: [], first: [], edit: [], cancel: [] };
  for (let n = 0; n < rounds; n++) {
    await run(tokens.slice(0, -1));
    found.append.push((await run([...tokens.slice(0, -1), draw()]))[0].delay);
    await run(tokens);
    found.middle.push((await run(changed(tokens.length >> 1)))[0].delay);
    found.first.push((await run(changed(0)))[0].delay);
    found.edit.push((await run(tokens, n % 2 ? {} : { heads: { "0.0": "off" } }))[0].delay);
    const cancelled = run(changed(0));
    await new Promise((ready) => setTimeout(ready, 20));
    const sent = performance.now();
    worker.postMessage({ kind: "cancel" });
    const [reply] = await cancelled;
    if (reply.kind === "cancelled") found.cancel.push(reply.at - sent);
  }
  done(found);
})();
"""


PAGE = """
const [rounds, done] = arguments;
const field = document.getElementById("text");
const text = field.value;
const half = text.length >> 1;
const frame = () => new Promise(requestAnimationFrame);
const letter = () => String.fromCharCode(97 + Math.floor(Math.random() * 26));
const found = { append: [], middle: [], edit: [], frames: [] };
let longest = 0; // milliseconds between two frames
// Milliseconds until the page shows the results of an action.
async function latency(action) {
  let last = await frame();
  const began = performance.now();
  action();
  do {
    const now = await frame();
    longest = Math.max(longest, now - last);
    last = now;
  } while (document.documentElement.dataset.busy === "yes");
  await new Promise((drawn) => setTimeout(drawn));
  return performance.now() - began;
}
function write(next) {
  field.value = next;
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
}
(async () => {
  for (let n = 0; n < rounds; n++) {
    longest = 0;
    await latency(() => write(text.slice(0, -1)));
    found.append.push(await latency(() => write(text.slice(0, -1) + letter())));
    found.middle.push(await latency(() => write(text.slice(0, half) + letter() + text.slice(half + 1))));
    found.edit.push(await latency(() => document.getElementById("head-0.0").click()));
    await latency(() => document.getElementById("reset").click());
    found.frames.push(longest);
  }
  done(found);
})();
"""


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "width": 128, "tokens": 128, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--position", default="rope")
    flags = parser.parse_args()
    fields = {"model.num_layers": flags.layers, "model.d_model": flags.width, "context_length": flags.tokens}
    fields |= {"model.position": flags.position, "model.dtype": "float32", "mesh.data": 1}
    config = loading.load("configs/default.py", fields)
    tokenizer = ByteTokenizer()
    model = random_model(config, tokenizer.token_bytes, noise=0.05)
    random = np.random.default_rng(0)
    tokens = random.integers(97, 123, size=flags.tokens).tolist()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Chromium inherits it
    browser = chromium.start()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page.html"
        shown = playground.Shown("random", 0, model)
        path.write_text(playground.play([shown], tokenizer, bytes(tokens).decode(), title="random"), encoding="utf-8")
        browser.set_script_timeout(600)
        chromium.show(browser, path)
        of_page = browser.execute_async_script(PAGE, flags.rounds)
        play_worker.open_page(browser, path, [model])
        browser.set_script_timeout(600)
        of_worker = browser.execute_async_script(WORKER, tokens, len(tokenizer.token_bytes), flags.rounds)
    browser.quit()
    report("page", of_page)
    report("worker", of_worker)


def report(name: str, found: dict[str, list[float]]) -> None:
    """Print a table of latencies in milliseconds."""
    print(f"{name + ', ms':<14}{'median':>9}{'95%':>9}{'largest':>9}")
    for action, delays in found.items():
        quantiles = np.quantile(delays or [np.nan], [0.5, 0.95, 1])
        print(f"{action:<14}" + "".join(f"{value:9.1f}" for value in quantiles))


if __name__ == "__main__":
    main()
