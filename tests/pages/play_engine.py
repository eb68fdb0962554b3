"""Run the engine of the playground in Node."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from mini_gpt.pages.play import pack

DRIVER = """
const jobs = JSON.parse(require("fs").readFileSync(0, "utf8")), models = [];
const finished = (steps) => { for (;;) { const { value, done } = steps.next(); if (done) return value; } };
const results = [];
(async () => {
  for (const packed of jobs.models) models.push(await Model.unpack(packed));
  for (const { model, texts, edits } of jobs.passes) {
    try {
      const pass = new Pass(models[model], edits), logits = [];
      for (const tokens of texts) {
        const computed = finished(pass.run(tokens));
        const found = pass.logits(pass.config.num_layers, 0, tokens.length);
        logits.push({ computed, length: tokens.length, logits: [...found] });
      }
      results.push(logits);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      results.push(error.message);
    }
  }
  console.log(JSON.stringify(results));
})();
"""


def node(script: str, given) -> str:
    """Return what a script prints that follows the engine. given: its standard input, as JSON."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    source = pack.script() + script
    done = subprocess.run(["node", "-e", source], input=json.dumps(given), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logits(models, passes):
    """Return, for each pass, the logits_LV of its texts, or the message of a refusal.

    passes: (index of the model, texts, edits). The texts of a pass share its cache.
    """
    as_lists = lambda texts: [np.asarray(text).tolist() for text in texts]
    jobs = [{"model": model, "texts": as_lists(texts), "edits": edits} for model, texts, edits in passes]
    answers = node(DRIVER, {"models": [pack.packed(model) for model in models], "passes": jobs})
    return [answer if isinstance(answer, str) else list(map(_rows, answer)) for answer in answers]


def _rows(text) -> np.ndarray:
    return np.reshape(text["logits"], (text["length"], -1))
