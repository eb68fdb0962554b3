"""The speed of decoding one text with random weights, for `python -m mini_gpt.bench --decode`."""

import functools
import time
from collections.abc import Sequence

import numpy as np

from mini_gpt.commands.measuring import machine, spread
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, token_store
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding, prompts
from mini_gpt.generation.sampling import Sampling
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import sharding
from mini_gpt.training import inputs, train_state
from mini_gpt.training.inputs import layout_of

ROUNDS = 10  # texts that are decoded


def random_model(config: Config) -> LoadedModel:
    tokenizer = token_store.fit_tokenizer(corpora.open_corpus(config.data), config.data)
    vocab_size = inputs.vocab_size(config, tokenizer)
    mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
    definition, abstract_state = train_state.abstract(config, vocab_size, mesh)
    parameters, layout = train_state.first(config, vocab_size, abstract_state).parameters, layout_of(config, tokenizer)
    return LoadedModel(parameters, definition, config, mesh, config.batch_tokens, layout)


def time_decoding(
    model: LoadedModel, prompt: np.ndarray, tokens: int, sampling: Sampling, source: np.ndarray | None = None
) -> tuple[float, float]:
    """Decode one text. Return the seconds to its first token, and the tokens per second after it."""
    begin = time.perf_counter()
    sources = None if source is None else [source]
    parts = decoding.stream(model, [prompt], length=tokens, sampling=sampling, sources=sources)
    next(parts)
    first = time.perf_counter()
    count = sum(part.shape[1] for part in parts)
    return first - begin, count / (time.perf_counter() - first)


def decoding_speed(times: Sequence[tuple[float, float]]) -> dict:
    """Return the medians and quartiles of several results of `time_decoding`."""
    first, speeds = zip(*times, strict=True)
    return {"seconds_to_first_token": spread(first), "tokens_per_second": spread(speeds)}


def decode(path: str, overrides: dict[str, str], prompt_tokens: int, tokens: int) -> dict:
    """Measure decoding with random weights and top-k sampling, of a random prompt.

    With an encoder, the source is random, and the target starts with a separator. Raises the errors of
    `ModelConfig.check_length`.
    """
    config = loading.load(path, overrides)
    config.model.check_length(prompt_tokens + (1 if config.model.has_encoder else tokens))  # a separator
    model = random_model(config)
    vocab_size = len(model.parameters["embedding"])
    prompt, source = np.random.default_rng(0).integers(vocab_size, size=prompt_tokens), None
    if config.model.has_encoder:
        start = model.layout.separator_id or 0  # None with span corruption: any token may start a target
        source = (prompt + (prompt == start)) % vocab_size  # without the separator, which would divide it
        prompt = np.array([start])
    decode_text = functools.partial(time_decoding, model, prompt, tokens, Sampling(top_k=40), source)
    compile_seconds, _ = decode_text()
    times = decoding_speed([decode_text() for _ in range(ROUNDS)])
    return {
        "decoded": path,
        "overrides": overrides,
        "prompt_tokens": len(prompt),
        **({} if source is None else {"source_tokens": len(source)}),
        "tokens": tokens,
        "dtype": prompts.dtype(config.model).name,
        "compile_seconds": compile_seconds,
        **times,
        "parameters": model_parameters.count(model.parameters),
        **machine(1),
    }
