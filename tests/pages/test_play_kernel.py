"""The playground's matrix products: in WebAssembly they are those of NumPy, and JavaScript takes their place."""

import shutil
import subprocess

import numpy as np
import pytest

from tests.conftest import slow
from tests.pages import node, play_engine
from tests.pages.play_engine import make
from tests.pages.test_play_engine import LIMIT, TOKENS, by_jax

FOLDER = play_engine.page.PAGE.parent / "engine"
SOURCE = FOLDER / "kernel.wat"


def assembled(tmp_path) -> bytes:
    """Return the binary of kernel.wat, by wasmtime or by wabt."""
    try:
        import wasmtime

        return bytes(wasmtime.wat2wasm(SOURCE.read_text(encoding="utf-8")))
    except ImportError:
        if shutil.which("wat2wasm") is None:
            pytest.skip("needs wasmtime from PyPI, or wat2wasm of wabt")
    subprocess.run(["wat2wasm", SOURCE, "-o", tmp_path / "kernel.wasm"], check=True)
    return (tmp_path / "kernel.wasm").read_bytes()


def sections(binary: bytes) -> list[tuple[int, bytes]]:
    """Return (id, contents) of the sections of a module, without custom ones (id 0): names of functions and locals."""
    assert binary[:8] == b"\0asm\1\0\0\0"
    found, at = [], 8
    while at < len(binary):
        kind, size, shift, at = binary[at], 0, 0, at + 1
        while True:  # LEB128: seven bits in each byte
            size, shift, at = size | (binary[at] & 127) << shift, shift + 7, at + 1
            if binary[at - 1] < 128:
                break
        found.append((kind, binary[at : at + size]))
        at += size
    return [section for section in found if section[0]]


def test_the_binary_is_that_of_the_source(tmp_path):
    decoded = node.evaluate([FOLDER / "kernel.js"], "[...Buffer.from(BINARY, 'base64')]", None)
    assert sections(bytes(decoded)) == sections(assembled(tmp_path))


PRODUCTS = """given.shapes.map(([rows, inputs, outputs]) => {
  let state = 7;
  const draw = () => ((state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 31 - 1);
  const drawn = (length) => Float32Array.from({ length }, draw);
  const x = drawn(rows * inputs), weights = drawn(outputs * inputs), bias = drawn(outputs);
  const kernel = Kernel.of(weights), fields = { inputs, outputs, bias };
  const byOthers = Kernel.of(drawn(3)); // its memory has other parameters
  for (const { floats, free } of [kernel, byOthers]) floats.fill(NaN, free);
  const linears = {
    parameter: { ...fields, kernel, weights: kernel.parameters },
    copied: { ...fields, kernel: byOthers, weights },
    javascript: { ...fields, kernel: null, weights },
  };
  const of = ([name, linear]) => [name, [...product(x, linear)]];
  return { x: [...x], weights: [...weights], bias: [...bias], y: Object.fromEntries(Object.entries(linears).map(of)) };
})"""


def check_products(shapes, limit):
    """limit: of the error, divided by the root of the number of terms: about the standard deviation of the sums."""
    found = node.evaluate(play_engine.scripts(), PRODUCTS, {"shapes": shapes})
    for (rows, inputs, outputs), case in zip(shapes, found, strict=True):
        x_RI, weights_OI = np.reshape(case["x"], (rows, inputs)), np.reshape(case["weights"], (outputs, inputs))
        wanted_RO = x_RI @ weights_OI.T + case["bias"]  # in float64
        for name, y in case["y"].items():
            error = np.abs(np.reshape(y, wanted_RO.shape) - wanted_RO).max() / np.sqrt(inputs)
            assert error < limit, (name, rows, inputs, outputs, error)


@pytest.mark.slow
def test_products_of_all_remainders_are_those_of_float64():
    sizes = (1, 2, 3, 4, 5, 7, 8)
    check_products([(rows, n, m) for rows in (1, 2, 3, 5) for n in sizes for m in sizes], limit=2e-7)


def test_sums_over_wide_rows_keep_their_digits():
    """d_model 1024 and d_ff 4096: float32 sums have an error of less than 1e-6 of their standard deviation."""
    check_products([(2, 1024, 8), (2, 4096, 8), (2, 4096, 6)], limit=1e-6)


LONG = np.random.default_rng(1).integers(play_engine.VOCAB, size=45)  # several blocks of 16 places, and a rest
BLOCKS = [
    {"position": "rope", "attention_window": (5, None), "num_kv_heads": 2},
    *slow(
        {"position": ("cope", "fox"), "variants.gate": "entry"},
        {"position": "alibi", "variants.selective": True, "variants.soft_cap": 2.0},
        {"position": "pope", "variants.query_scale": "ssmax", "num_kv_heads": 1},
        {"position": ("t5", "fire"), "variants.normaliser": "stick_breaking", "variants.canon": True},
    ),
]


@pytest.mark.parametrize("fields", BLOCKS, ids=str)
def test_texts_of_several_blocks_have_the_logits_of_jax(fields):
    """The second text comes from the cache up to place 22; it has the same bits in a new pass."""
    model, changed = make(fields), np.where(np.arange(len(LONG)) == 22, (LONG + 1) % play_engine.VOCAB, LONG)
    (_, (found_LV, computed)), [(again_LV, _)] = play_engine.passes(
        [model], [(0, [LONG, changed], {}), (0, [changed], {})]
    )
    np.testing.assert_allclose(found_LV, by_jax(model, changed), atol=LIMIT, rtol=0)
    np.testing.assert_array_equal(found_LV, again_LV)
    assert computed == (len(LONG) if fields.get("variants.selective") else len(LONG) - 22)


@pytest.mark.parametrize("missing", ["Module", "Memory"])
def test_without_webassembly_javascript_has_the_same_logits(tmp_path, monkeypatch, missing):
    script = tmp_path / "without.js"
    value = "class { constructor() { throw new RangeError('none'); } }"
    script.write_text(
        f"const WebAssembly = Object.create(globalThis.WebAssembly, {{ {missing}: {{ value: {value} }} }});"
    )
    scripts = [script, *play_engine.scripts()]
    assert node.evaluate(scripts, "Kernel.of(new Float32Array(4))", None) is None
    assert node.evaluate(scripts[1:], "Kernel.of(new Float32Array(4)).parameters.length", None) == 4
    monkeypatch.setattr(play_engine, "scripts", lambda: scripts)
    model = make({"position": "rope", "num_kv_heads": 2, "activation": "swiglu", "output_bias": True})
    [[(logits_LV, _)]] = play_engine.passes([model], [(0, [TOKENS], {})])
    np.testing.assert_allclose(logits_LV, by_jax(model, TOKENS), atol=LIMIT, rtol=0)
