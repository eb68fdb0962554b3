"""Our process of benchmarks/rivals.py and benchmarks/growth.py, which start it.

python -m benchmarks.programs_jax JSON

JSON: an entry of `rivals.WORKS`, with its `program`, `dtype`, `text` and directory of `weights`.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import tasks, turns
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.data import batches, corpora, token_store
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding as generation
from mini_gpt.hugging_face import exporting
from mini_gpt.model import build
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import sharding
from mini_gpt.training import assembly


def training(work: dict) -> tasks.Program:
    """Train as configs/shakespeare_char_cpu.py does, and read the loss of each step."""
    size = {"model.num_layers": work["layers"], "model.num_heads": work["heads"], "model.d_model": work["width"]}
    size |= {"context_length": work["length"], "train.batch_size": work["batch"], "model.dtype": work["dtype"]}
    given = {"data.path": work["text"], "model.attention": work.get("attention", "auto")}
    config = loading.load("configs/shakespeare_char_cpu.py", size | given)
    mesh, corpus = assembly.make_mesh(config), corpora.open_corpus(config.data)
    run = assembly.assemble(config, mesh, corpus, token_store.fit_tokenizer(corpus, config.data))
    compiled, state = run.lowered_step().compile(), run.first_state()

    def losses() -> Iterator[float]:
        nonlocal state
        endless = itertools.chain.from_iterable(
            batches.iterate(run.objective.train_batches, 0, config.train.steps) for _ in itertools.count()
        )
        for batch in sharding.prefetch_to_device(endless, mesh):
            state, metrics = compiled(state, batch)
            yield float(metrics["loss"])

    about = {"parameters": model_parameters.count(run.abstract_state.parameters), "vocabulary": run.vocab_size}
    about["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    return tasks.training(losses(), work, about)


def random_llama(work: dict) -> LoadedModel:
    """Return a model of the shape with random weights, and write it to the directory `weights` for Transformers."""
    llama = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "use_bias": False, "rope.base": 1e5}
    size = {"num_layers": work["layers"], "d_model": work["width"], "d_ff": work["feed_forward"]}
    size |= {"num_heads": work["heads"], "num_kv_heads": work["kv_heads"]}
    size |= {"dtype": work["dtype"], "param_dtype": work["dtype"]}
    fields = {f"model.{name}": value for name, value in (llama | size).items()}
    config = loading.load("configs/default.py", fields | {"context_length": work["length"]})
    definition, parameters = build.split(build.make(config.model, work["vocabulary"], rngs=nnx.Rngs(0)))
    parameters = jax.tree.map(lambda leaf: leaf.astype(work["dtype"]), parameters)
    model = LoadedModel(
        parameters, definition, config, sharding.make_mesh(*config.mesh.sizes), config.batch_tokens, PLAIN
    )
    exporting.write_model(model, Path(work["weights"]), options=exporting.Options("llama", work["dtype"]))
    return model


def scoring(work: dict) -> tasks.Program:
    """Compute the loss of each token of a random text."""
    model = random_llama(work)

    def score(text_L: np.ndarray) -> np.ndarray:
        return np.asarray(model.nll(text_L[None, :-1], text_L[None, 1:]))[0]

    return tasks.scoring(score, work, about(model))


def decoding(work: dict) -> tasks.Program:
    """Generate the most likely tokens after a random prompt."""
    model = random_llama(work)

    def generate(prompt_L: np.ndarray) -> np.ndarray:
        return generation.generate(model, [prompt_L], length=work["tokens"], sampling=generation.GREEDY)[0]

    return tasks.decoding(generate, work, about(model))


def about(model: LoadedModel) -> dict[str, Any]:
    return {"parameters": model_parameters.count(model.parameters)}


@command_line.command
def main() -> None:
    work = json.loads(sys.argv[1])
    command_line.set_up()
    measure, about = {"training": training, "scoring": scoring, "decoding": decoding}[work["task"]](work)
    memory = lambda: {"peak_bytes": turns.peak_resident_bytes()}
    turns.serve(about | {"jax": jax.__version__}, measure, memory)


if __name__ == "__main__":
    main()
