"""Measure how fast the playground's worker answers a keystroke, in headless Chromium on one core.

python -m benchmarks.play_latency [--layers=4 --width=128 --tokens=128 --vocabulary=256 --position=rope --rounds=30]

The model has random parameters. A latency is the time from the page's message to the worker's reply, with the eight
most likely next tokens at all places, and with the logit lens. Prints median, 95th percentile and largest latency of:
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

from mini_gpt.commands import command_line
from mini_gpt.config import loading as configs
from tests.evaluation.models import random_model
from tests.pages import browser as chromium
from tests.pages import play_worker

MEASURE = """
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


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "width": 128, "tokens": 128, "vocabulary": 256, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--position", default="rope")
    flags = parser.parse_args()
    fields = {"model.num_layers": flags.layers, "model.d_model": flags.width, "context_length": flags.tokens}
    fields |= {"model.position": flags.position, "model.dtype": "float32", "mesh.data": 1}
    config = configs.load("configs/default.py", fields)
    model = random_model(config, [b""] * flags.vocabulary, noise=0.05)
    text = np.random.default_rng(0).integers(flags.vocabulary, size=flags.tokens).tolist()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Chromium inherits it
    browser = chromium.start()
    with tempfile.TemporaryDirectory() as directory:
        play_worker.open_page(browser, Path(directory) / "page.html", [model])
        browser.set_script_timeout(600)
        found = browser.execute_async_script(MEASURE, text, flags.vocabulary, flags.rounds)
    browser.quit()
    print(f"{'milliseconds':<14}{'median':>9}{'95%':>9}{'largest':>9}")
    for name, delays in found.items():
        quantiles = np.quantile(delays or [np.nan], [0.5, 0.95, 1])
        print(f"{name:<14}" + "".join(f"{value:9.1f}" for value in quantiles))


if __name__ == "__main__":
    main()
