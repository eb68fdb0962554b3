"""Run the engine of the playground in Node, on models with random parameters."""

import json
import shutil
import subprocess

import jax
import numpy as np
import pytest

from mini_gpt.config import loading as configs
from mini_gpt.model import gpt
from mini_gpt.model.layout import Layout
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import path_name
from mini_gpt.pages.play import pack
from mini_gpt.runtime import sharding

VOCAB = 23
SIZE = {"model.num_layers": 2, "model.d_model": 16, "model.num_heads": 4, "model.dtype": "float32", "mesh.data": 1}
SIZE |= {"context_length": 12}

TOOLS = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const finished = (steps) => { for (;;) { const { value, done } = steps.next(); if (done) return value; } };
"""
PASSES = """
(async () => {
  const models = [], results = [];
  for (const packed of given.models) models.push(await Model.unpack(packed));
  for (const { model, texts, edits } of given.passes) {
    try {
      const pass = new Pass(models[model], edits);
      results.push(texts.map((tokens) => {
        const computed = finished(pass.run(tokens)), logits = pass.logits(pass.config.num_layers, 0, tokens.length);
        return { computed, length: tokens.length, logits: [...logits] };
      }));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      results.push(error.message);
    }
  }
  console.log(JSON.stringify(results));
})();
"""
CONVERSATION = """
const replies = [], whole = (name, value) => (ArrayBuffer.isView(value) ? [...value] : value);
const desk = new Desk((reply) => replies.push(reply), () => new Promise((done) => setImmediate(done)));
(async () => {
  for (const request of given) {
    if (request.kind !== "wait") desk.receive(request);
    else while (desk.busy) await new Promise((done) => setImmediate(done));
  }
  while (desk.busy) await new Promise((done) => setImmediate(done));
  console.log(JSON.stringify(replies, whole));
})();
"""


def node(script: str, given):
    """Return the JSON that a script prints. It follows the engine and TOOLS. given: its input, as JSON."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    command = ["node", "--input-type=commonjs", "-e", pack.script() + TOOLS + script]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def passes(models, given):
    """Return (logits_LV, computed places) of each text of each pass; for a refusal, its message.

    given: (index of the model, texts, edits). The texts of a pass share its cache.
    """
    as_lists = lambda texts: [np.asarray(text).tolist() for text in texts]
    jobs = [{"model": model, "texts": as_lists(texts), "edits": edits} for model, texts, edits in given]
    answers = node(PASSES, {"models": [pack.packed(model) for model in models], "passes": jobs})
    return [answer if isinstance(answer, str) else list(map(_of_text, answer)) for answer in answers]


def _of_text(answer) -> tuple[np.ndarray, int]:
    return np.reshape(answer["logits"], (answer["length"], -1)), answer["computed"]


def replies(requests):
    """Return the worker's replies. A request {"kind": "wait"} waits for the replies to the earlier ones."""
    return node(CONVERSATION, requests)


def make(fields=None, *, seed=0, layout=None, **overrides) -> LoadedModel:
    """Return a small model whose parameters are all random. fields: of the model, without `model.` before them."""
    named = {f"model.{name}": value for name, value in (fields or {}).items()}
    config = configs.load("configs/default.py", SIZE | named | overrides)
    definition, abstract = gpt.abstract(config.model, VOCAB)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        drawn = 0.4 * rng.standard_normal(leaf.shape)
        return (drawn + (path_name(path[-1:]) in ("scale", "factor"))).astype(np.float32)

    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    return LoadedModel(parameters, definition, config, mesh, config.batch_tokens, layout or Layout())
