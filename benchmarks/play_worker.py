"""Run the worker of the playground in headless Chromium, from a page of one file."""

import json
from pathlib import Path

from mini_gpt.pages import document
from mini_gpt.pages.play import pack, page
from tests.pages.browser import show

PAGE = """<!doctype html><meta charset="utf-8"><title>worker</title>
<script id="engine" type="text/plain">{script}</script>
<script id="models" type="application/json">{models}</script>
<script>
const script = document.getElementById("engine").textContent;
const worker = new Worker(URL.createObjectURL(new Blob([script], {{ type: "text/javascript" }})));
const waiting = new Map();
worker.onmessage = ({{ data }}) => waiting.get(data.id)?.push({{ ...data, at: performance.now() }});
// The replies to a request, up to one of the last kind.
async function ask(request) {{
  const replies = [], id = waiting.size, last = ["loaded", "result", "attention", "done", "cancelled", "refused"];
  waiting.set(id, replies);
  const sent = performance.now();
  worker.postMessage({{ ...request, id }});
  while (!last.includes(replies.at(-1)?.kind)) await new Promise((done) => setTimeout(done));
  return replies.map((reply) => ({{ ...reply, delay: reply.at - sent }}));
}}
const packed = JSON.parse(document.getElementById("models").textContent);
Promise.all(packed.map((each, model) => ask({{ kind: "load", model, packed: each }})))
  .then(() => (document.documentElement.dataset.ready = "yes"));
</script>
"""
ASK = """
const [request, done] = arguments, plain = (name, value) => (ArrayBuffer.isView(value) ? [...value] : value);
ask(request).then((replies) => done(JSON.stringify(replies, plain)));
"""


def open_page(browser, path: Path, models) -> None:
    """Write a page with these models, and open it when they are loaded."""
    packed = json.dumps([pack.packed(model) for model in models])
    script = document.bundle(page.PAGE.parent / "engine/worker.js")
    path.write_text(PAGE.format(script=script, models=packed), encoding="utf-8")
    browser.set_script_timeout(120)
    show(browser, path)


def ask(browser, request):
    """Return the replies to a request. `delay`: milliseconds from the request to the reply."""
    return json.loads(browser.execute_async_script(ASK, request))
