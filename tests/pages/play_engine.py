"""Run the engine of the playground in Node, on models with random parameters."""

from pathlib import Path

import jax
import numpy as np

from mini_gpt.config import loading
from mini_gpt.data.layout import Layout
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import build
from mini_gpt.model.parameters import path_name
from mini_gpt.pages import document
from mini_gpt.pages.play import pack, page
from mini_gpt.runtime import sharding
from tests.pages import node

VOCAB = 23
SIZE = {"model.num_layers": 2, "model.d_model": 16, "model.num_heads": 4, "model.dtype": "float32", "mesh.data": 1}
SIZE |= {"context_length": 12}

PASSES = """(async () => {
  const finished = (steps) => { for (;;) { const { value, done } = steps.next(); if (done) return value; } };
  const models = [];
  for (const packed of given.models) models.push(await Model.unpack(packed));
  return given.passes.map(({ model, texts, edits }) => {
    try {
      const pass = new Pass(models[model], edits);
      return texts.map((tokens) => {
        const computed = finished(pass.run(tokens)), logits = pass.logits(pass.config.num_layers, 0, tokens.length);
        return { computed, length: tokens.length, logits: [...logits] };
      });
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      return error.message;
    }
  });
})()"""
CONVERSATION = """(async () => {
  const replies = [], list = (value) => (ArrayBuffer.isView(value) ? [...value] : value?.tokens ? lists(value) : value);
  const lists = (reply) => Object.fromEntries(Object.entries(reply).map(([name, value]) => [name, list(value)]));
  const queue = new JobQueue((reply) => replies.push(lists(reply)), () => new Promise((done) => setImmediate(done)));
  for (const request of [...given, { kind: "wait" }]) {
    if (request.kind !== "wait") queue.receive(request);
    else while (queue.busy) await new Promise((done) => setImmediate(done));
  }
  return replies;
})()"""


def scripts() -> list[Path]:
    """Return the modules of the worker, in the order of the page."""
    return document.modules(page.PAGE.parent / "engine/worker.js")


def passes(models, given):
    """Return (logits_LV, computed places) of each text of each pass; for a refusal, its message.

    given: (index of the model, texts, edits). The texts of a pass share its cache.
    """
    as_lists = lambda texts: [np.asarray(text).tolist() for text in texts]
    jobs = [{"model": model, "texts": as_lists(texts), "edits": edits} for model, texts, edits in given]
    answers = node.evaluate(scripts(), PASSES, {"models": [pack.packed(model) for model in models], "passes": jobs})
    return [answer if isinstance(answer, str) else list(map(_of_text, answer)) for answer in answers]


def _of_text(answer) -> tuple[np.ndarray, int]:
    return np.reshape(answer["logits"], (answer["length"], -1)), answer["computed"]


def replies(requests):
    """Return the worker's replies. A request {"kind": "wait"} waits for the replies to the earlier ones."""
    return node.evaluate(scripts(), CONVERSATION, requests)


def make(fields=None, *, seed=0, layout=None, **overrides) -> LoadedModel:
    """Return a small model whose parameters are all random. fields: of the model, without `model.` before them."""
    named = {f"model.{name}": value for name, value in (fields or {}).items()}
    config = loading.load("configs/default.py", SIZE | named | overrides)
    definition, abstract = build.abstract(config.model, VOCAB)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        drawn = 0.4 * rng.standard_normal(leaf.shape)
        return (drawn + (path_name(path[-1:]) in ("scale", "factor"))).astype(np.float32)

    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    return LoadedModel(parameters, definition, config, mesh, config.batch_tokens, layout or Layout())
