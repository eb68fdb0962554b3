"""Text drawn token by token is what the model's own logits say."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.decoding import Writer
from mini_gpt.generation.sampling import Sampling
from mini_gpt.model import MiniGPT, gpt, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError

CONTEXT, VOCAB = 8, 13
GREEDY = Sampling(temperature=0.0)


def make(**overrides):
    base = {"context_length": CONTEXT, "model.d_model": 16, "model.num_layers": 2, "model.dtype": "float32"}
    base |= {"model.tie_embeddings": False, "model.use_bias": False}  # so that no token is likeliest everywhere
    config = configs.load("configs/default.py", base | overrides)
    definition, drawn = parameters.split(MiniGPT(config.model, VOCAB, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(3), len(jax.tree.leaves(drawn))))
    return definition, jax.tree.map(lambda leaf: leaf + 1.0 * jax.random.normal(next(keys), leaf.shape), drawn)


def generate(model, *prompts, length=12, **options):
    return generation.generate(*model, prompts=prompts, length=length, **options).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"model.position": "rope"},
        {"model.position": "learned", "model.max_positions": 40},
        {"model.position": "alibi", "model.attention_window": 4},
    ],
)
def test_at_temperature_0_each_token_is_the_likeliest_after_all_before_it(fields, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK", 5)
    model, prompts = make(**fields), ([3], [1, 2, 3, 4], list(range(12)))
    forward = jax.jit(parameters.merge(*model))
    written = generate(model, *prompts, length=23, sampling=GREEDY)
    assert len({token for drawn in written for token in drawn}) > 3, "a model that says one thing alone shows nothing"
    for prompt, drawn in zip(prompts, written, strict=True):
        assert len(drawn) == 23
        tokens = np.array([*prompt, *drawn])
        logits_LV = forward(jnp.array([[*tokens, *[0] * (40 - len(tokens))]]))[0]  # the model is causal
        assert np.argmax(logits_LV, axis=-1)[len(prompt) - 1 : len(tokens) - 1].tolist() == drawn
    for prompt, drawn in zip(prompts, written, strict=True):
        assert generate(model, prompt, length=23, sampling=GREEDY) == [drawn]


def test_tokens_come_as_they_are_drawn_and_nothing_is_compiled_after_the_first(monkeypatch):
    model, compiled = make(), []
    parts = generation.stream(*model, [[1, 2]], length=40)
    assert next(parts).shape == (1, 1)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        assert [part.shape[1] for part in parts] == [16, 16, 7]
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]


def test_prompts_of_like_lengths_share_their_programs():
    model = make(**{"model.position": "alibi"})
    generate(model, [1] * 20, length=20)
    sizes = generation._read._cache_size(), generation._write._cache_size()
    generate(model, [1] * 17, length=5)
    generate(model, [2] * 30, length=30)
    assert (generation._read._cache_size(), generation._write._cache_size()) == sizes


def test_the_cache_is_written_in_place():
    definition, drawn = make(**{"model.num_kv_heads": 2, "model.num_heads": 4})
    tokens_BL, lengths_B = np.zeros((3, 16), np.int32), np.array([1, 16, 3], np.int32)
    writing = generation._read(definition, None, Sampling(top_k=4), 64, drawn, tokens_BL, lengths_B, 0)
    assert writing.cache.keys_NXSK[0].shape == (6, 64, 4)
    compiled = generation._write.lower(definition, None, Sampling(top_k=4), drawn, writing, 16).compile().as_text()
    assert "f32[6,64,4]" in compiled
    assert not re.findall(r"f32\[6,64,4\]\S* copy\(", compiled)


def test_on_cpus_auto_is_float32(monkeypatch):
    prompt, options = [3, 1], {"length": 12, "sampling": Sampling(temperature=0.7)}
    plain = generate(make(), prompt, **options)
    monkeypatch.setattr(gpt.devices, "has_bfloat16", lambda device: True)
    model = make(**{"model.dtype": "auto"})
    assert parameters.merge(*model).dtype == jnp.bfloat16
    asked, in_float32 = [], generation._in_float32
    monkeypatch.setattr(generation, "_in_float32", lambda *model: asked.append(model) or in_float32(*model))
    assert generate(model, prompt, **options) == plain and asked
    assert generation._in_float32(parameters.merge(*model).config, VOCAB) == make()[0]


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"tensor": 2, "fsdp": 2}, {"data": 2, "tensor": 4}])
def test_parameters_on_several_devices_write_the_same(axes):
    fields = {"model.num_heads": 4, "model.d_model": 16}
    definition, drawn = make(**fields)
    mesh = sharding.make_mesh(
        *configs.load("configs/default.py", {f"mesh.{name}": n for name, n in axes.items()}).mesh.sizes
    )
    divided = jax.device_put(drawn, sharding.tree_shardings(drawn, mesh))
    assert max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(divided)) == mesh.size > 1
    options = {"length": 9, "sampling": Sampling(temperature=0.5, top_k=5), "seed": 2}
    expected = generate((definition, drawn), [1, 2, 3], [4], **options)
    assert generate((definition, divided), [1, 2, 3], [4], **options) == expected


def test_isolated_documents_are_written_as_they_were_trained():
    model = make()
    tokens = [4, 5, 12, 6, 7]  # 12 is the separator: what is before it must not matter
    kept = generate(model, tokens, length=3, sampling=GREEDY, isolate_at=12)
    assert kept == generate(model, [9, 9, 12, 6, 7], length=3, sampling=GREEDY, isolate_at=12)
    alone = parameters.merge(*model)(jnp.array([[12, 6, 7]]))[0, -1]
    assert kept[0][0] == int(jnp.argmax(alone))


def test_seeds_reproduce_and_differ_whatever_is_written_beside():
    model = make()
    first, second = generate(model, [1], [1], seed=1)
    assert first != second and [first] == generate(model, [1], seed=1) != generate(model, [1], seed=2)
    assert generate(model, [1], [4, 5, 6], seed=1)[0] == first


def test_places_draw_one_by_one_and_what_was_drawn_is_repeated_less():
    model = make()
    (even,) = generate(model, [1, 2], length=40, sampling=Sampling(temperature=1e6))
    assert len(set(even)) > 6, "all but even chances, a key a place"
    (repelled,) = generate(model, [1, 2], length=10, sampling=Sampling(temperature=0.0, repetition_penalty=1e6))
    assert len({*repelled}) > 8 > 3 * len({*generate(model, [1, 2], length=10, sampling=GREEDY)[0]})


def test_chance_is_of_the_seed_the_row_and_the_place_alone():
    written = generate(make(), [1], [2, 3, 4], length=37, sampling=Sampling(temperature=1e9), seed=5)
    for row, (begin, drawn) in enumerate(zip((1, 3), written, strict=True)):
        key = jax.random.fold_in(jax.random.key(5), row)
        draws = [jax.random.gumbel(jax.random.fold_in(key, begin + place), (VOCAB,)) for place in range(37)]
        assert drawn == [int(jnp.argmax(draw)) for draw in draws]


def test_draws_follow_the_softmax_at_the_temperature():
    model = make()
    logits = np.asarray(parameters.merge(*model)(jnp.array([[5, 2]]))[0, -1], np.float64) / 4
    expected = np.exp(logits) / np.exp(logits).sum()
    draws = generate(model, *[[5, 2]] * 2000, length=1, sampling=Sampling(temperature=4.0))
    found = np.bincount(np.ravel(draws), minlength=VOCAB) / len(draws)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(len(draws)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"length": -1}, "length: found -1"),
        ({"prompts": [[1], []]}, "prompt: found no token"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        generation.generate(*make(), **({"prompts": [[1]], "length": 3} | arguments))


def test_a_bidirectional_model_does_not_write():
    with pytest.raises(UserError, match=r"model\.causal: found False"):
        generate(make(**{"model.causal": False, "train.objective": "masked"}), [1])


def test_a_learned_tables_end_is_never_passed():
    model = make(**{"model.position": "learned"})
    assert len(generate(model, [1, 2], length=6)[0]) == 6
    with pytest.raises(UserError, match="the learned table has 8 positions; found a length of 9"):
        generate(model, [1, 2], length=7)


def written(writer, tokens):
    """Gives what was shown after each token, and at the end."""
    return [*(writer.add([token]) for token in tokens), writer.finish()]


def test_a_character_is_shown_when_it_is_whole():
    shown = written(Writer(ByteTokenizer()), "aé😀b".encode())
    assert shown == ["a", "", "é", "", "", "", "😀", "b", ""]
    shown = written(Writer(ByteTokenizer()), b"a\xff\xffbcd\xc3")
    assert "".join(shown) == "a\ufffd\ufffdbcd\ufffd"


@pytest.mark.parametrize(
    "stops, text, shown, by",
    [
        (["stop"], "go on, stop here", "go on, ", "stop"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["aab"], "aaab", "a", "aab"),
        (["xyz", "b"], "aaxyb", "aaxy", "b"),
        (["never"], "it is nev", "it is nev", None),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_shown(stops, text, shown, by):
    for tokens in ([text.encode()], [[byte] for byte in text.encode()]):
        writer = Writer(ByteTokenizer(), stops)
        parts = [*(writer.add(part) for part in tokens), writer.finish()]
        assert "".join(parts) == shown == writer.text and writer.ended_by == by


def test_the_separator_ends_the_text():
    tokenizer = CharacterTokenizer("abc")
    writer = Writer(tokenizer)
    assert written(writer, [0, 1, 3, 2]) == ["a", "b", "", "", ""]
    assert writer.ended_by == "end of document" and writer.tokens == [0, 1] and writer.text == "ab"
