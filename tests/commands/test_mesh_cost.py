"""The calculated cost of a mesh, against sharded arrays, a compiled training step and sums by hand."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from configs import presets
from mini_gpt.commands import mesh_cost
from mini_gpt.config import loading
from mini_gpt.config.schema import MeshConfig
from mini_gpt.data import batches
from mini_gpt.runtime import sharding
from mini_gpt.training import state as states
from mini_gpt.training.step import make_train_step
from tests.conftest import REPOSITORY

SMALL_MODEL = {
    "model__num_heads": 8,
    "model__activation": "swiglu",
    "model__tie_embeddings": False,
    "context_length": 16,
}
ITEM = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


def on(small, mesh):
    fields = {"mesh__data": mesh.data, "mesh__fsdp": mesh.fsdp, "mesh__tensor": mesh.tensor}
    return small(data__tokenizer="bpe", data__vocab_size=320, **fields, **SMALL_MODEL)


ENCODER = {
    "data__corpus": "task:copy",
    "data__tokenizer": "characters",
    "data__task_length": 4,
    "model__encoder_layers": 3,
    "model__num_layers": 2,
    "context_length": 64,
    "source_length": 96,
}


def with_encoder(small, mesh, **fields):
    fields |= {"mesh__data": mesh.data, "mesh__fsdp": mesh.fsdp, "mesh__tensor": mesh.tensor}
    return small(**SMALL_MODEL | ENCODER | fields)


@pytest.mark.parametrize("mesh", [MeshConfig(2, 2, 2), MeshConfig(1, 8, 1)], ids=str)
@pytest.mark.parametrize("make", [on, with_encoder])
def test_memory_is_that_of_the_shards_of_a_device(small, make, mesh):
    config = make(small, mesh)
    _, abstract = states.abstract(config, 320, sharding.make_mesh(*config.mesh.sizes))
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)
    device = jax.devices()[5]

    def held(tree):
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    found = mesh_cost.cost(config, mesh_cost.abstract_state(config, 320), mesh)
    assert (found["parameters"], found["gradients"]) == (held(state.parameters), held(state.parameters))
    assert found["optimizer"] == held(state.optimizer_state)
    assert found["together"] == 2 * held(state.parameters) + held(state.optimizer_state)


def test_costs_equal_sums_by_hand():
    fields = {"context_length": 8, "model.num_layers": 1, "model.d_model": 4, "model.num_heads": 2, "model.d_ff": 8}
    fields |= {"model.use_bias": False, "model.norm": "rmsnorm", "data.tokenizer": "bpe", "data.vocab_size": 300}
    config = loading.load("configs/default.py", fields)
    abstract = mesh_cost.abstract_state(config, 300)
    # Four kernels of 4 × 4, two of 4 × 8, an embedding of 300 × 4; three scales of 4; two int32 of the optimizer.
    kernels, embedding, scales = 4 * (4 * 16 + 2 * 32), 4 * 1200, 4 * 12
    alone = mesh_cost.cost(config, abstract, MeshConfig(1, 1, 1))
    assert alone["parameters"] == alone["gradients"] == kernels + embedding + scales
    assert alone["optimizer"] == pytest.approx(2 * alone["parameters"], abs=8)
    assert alone["sent: gradients"] == alone["sent: parameters"] == alone["sent: activations"] == 0
    # Per token, in units of 2 bytes: 6 widths at norms; q, k, v, attention output; 4 hidden widths; 3 at the last norm.
    assert alone["activations"] == 8 * 2 * (6 * 4 + 4 * 4 + 4 * 8 + 3 * 4)
    assert alone["maps"] == 2 * 8 * 8 * (4 + 4 + 2)
    muon = mesh_cost.abstract_state(loading.override(config, {"optimizer.name": "muon"}), 300)
    found = mesh_cost.cost(config, muon, MeshConfig(1, 1, 1))["optimizer"]
    assert found == pytest.approx(kernels + 2 * (embedding + scales), abs=32)  # one moment of kernels; its counts
    after = loading.override(config, {"model.norm_placement": "post"})
    assert (
        mesh_cost.cost(after, mesh_cost.abstract_state(after, 300), MeshConfig(1, 1, 1))["activations"]
        == alone["activations"] - 8 * 2 * 3 * 4
    )
    # OLMo 2: the inputs of the sublayers and of the norms of their outputs, 2 bytes each; the last norm as before.
    fields = {"model.norm_placement": "none", "model.output_norm": True}
    outputs = mesh_cost.cost(
        loading.override(config, fields), mesh_cost.abstract_state(config, 300), MeshConfig(1, 1, 1)
    )
    assert outputs["activations"] == 8 * 2 * (4 * 4 + 4 * 4 + 4 * 8 + 3 * 4)
    four = mesh_cost.cost(config, abstract, MeshConfig(4, 1, 1))
    assert four["parameters"] == alone["parameters"] and four["sent: gradients"] == 2 * 3 / 4 * alone["parameters"]
    four = mesh_cost.cost(config, abstract, MeshConfig(1, 4, 1))
    assert four["parameters"] == (kernels + embedding) // 4 + scales
    assert four["sent: parameters"] == 3 * 3 / 4 * (kernels + embedding)
    assert four["sent: gradients"] == 2 * 3 / 4 * scales
    two = mesh_cost.cost(config, abstract, MeshConfig(1, 1, 2))
    assert two["parameters"] == kernels // 2 + embedding + scales
    assert two["sent: gradients"] == two["sent: parameters"] == 0
    assert two["sent: activations"] == 4 * (2 * 1 / 2) * (8 * 4 * 2) and two["maps"] == alone["maps"] / 2
    mixed = mesh_cost.cost(config, abstract, MeshConfig(3, 2, 2))
    assert mixed["parameters"] == kernels // 4 + embedding // 2 + scales
    assert mixed["sent: gradients"] == pytest.approx(2 * 2 / 3 * (kernels / 4 + embedding / 2) + 2 * 5 / 6 * scales)


def test_costs_of_an_encoder_equal_sums_by_hand():
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "data.task_length": 2}
    fields |= {"model.d_model": 4, "model.num_heads": 2, "model.d_ff": 8, "model.use_bias": False}
    fields |= {"context_length": 8, "source_length": 5, "model.num_layers": 3, "model.encoder_layers": 2}
    config = loading.load("configs/default.py", fields | {"model.norm": "rmsnorm", "model.share_embeddings": False})
    abstract = mesh_cost.abstract_state(config, 70)
    alone = mesh_cost.cost(config, abstract, MeshConfig(1, 1, 1))
    # Five layers of four kernels of 4 × 4 and two of 4 × 8; cross-attention in three; two embeddings; scales.
    kernels, tables, scales = 4 * (5 * (4 * 16 + 2 * 32) + 3 * 4 * 16), 2 * 4 * 70 * 4, 4 * 4 * (2 * 2 + 3 * 3 + 2)
    assert alone["parameters"] == kernels + tables + scales
    # In units of 2 bytes. Target: 3 widths at each of three norms; q, k, v, output; q, output of cross-attention; 4
    # hidden widths; 3 widths at the last norm.
    target = 8 * (3 * (3 * 3 * 4 + 4 * 4 + 2 * 4 + 4 * 8) + 3 * 4)
    source = 5 * (2 * (2 * 3 * 4 + 4 * 4 + 4 * 8) + 3 * 4 + 3 * 2 * 4)  # and keys and values for three layers
    assert alone["activations"] == 2 * (target + source)
    assert alone["maps"] == 2 * (3 * 8 * 8 + 2 * 5 * 5 + 3 * 8 * 5) * (4 + 4 + 2)
    assert alone["sent: gradients"] == alone["sent: parameters"] == alone["sent: activations"] == 0
    two = mesh_cost.cost(config, abstract, MeshConfig(1, 1, 2))
    assert two["parameters"] == kernels // 2 + tables + scales and two["maps"] == alone["maps"] / 2
    # An all-reduce of two devices sends the array once. Six of the target in each layer of the decoder; of the source,
    # four in each layer of the encoder, and one for the keys and values of each layer of the decoder.
    assert two["sent: activations"] == (6 * 3 * 8 + (4 * 2 + 3) * 5) * 4 * 2
    norms = 8 * (3 * 3 * 3 * 4 + 3 * 4) + 5 * (2 * 2 * 3 * 4 + 3 * 4)
    assert two["activations"] == 2 * (norms + (target + source - norms) / 2)
    four = mesh_cost.cost(config, abstract, MeshConfig(1, 4, 1))
    assert four["sent: parameters"] == 3 * 3 / 4 * (kernels + tables)
    page = mesh_cost.report("a.py", config, 70, "")
    assert "GB per device, context 8 and source 5;" in page and "`encoder/blocks/*/attention/key/kernel`" in page


def test_only_meshes_that_divide_the_model_are_listed(small):
    assert [(m.data, m.fsdp, m.tensor) for m in mesh_cost.meshes(on(small, MeshConfig(8, 1, 1)), 8)] == [
        (8 // t // f, f, t) for t in (1, 2, 4, 8) for f in (1, 2, 4, 8) if t * f <= 8
    ]
    gpt2 = loading.load("configs/presets.py:gpt2_small")  # twelve heads
    assert {mesh.tensor for mesh in mesh_cost.meshes(gpt2, 8)} == {1, 2, 4}


def compiled_step(config, vocab_size):
    """Return the compiled training step of a config, on its mesh."""
    place = sharding.make_mesh(*config.mesh.sizes)
    definition, abstract = states.abstract(config, vocab_size, place)
    rows = sharding.batch_sharding(place)
    shapes = batches.shapes(config).items()
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=rows) for name, (shape, kind) in shapes}
    return make_train_step(definition, config, abstract).lower(abstract, batch).compile()


def collectives(program):
    """Return a list of (kind, dtype, shape) of all arrays that the program sends."""
    found = []
    for arrays, kind in re.findall(
        r"= (\S+|\(.*?\)) (?:collective-)?(all-\w+|reduce-scatter|permute)(?:-start)?\(", program.as_text()
    ):
        for name, shape in re.findall(r"(\w+)\[([\d,]*)\]", arrays):
            found.append((kind, name, tuple(map(int, filter(None, shape.split(","))))))
    return found


def sent_by_eight(program):
    """Return the bytes that one of eight devices sends over a ring of all eight."""
    ring = {"all-gather": 7 / 8, "all-reduce": 2 * 7 / 8, "reduce-scatter": 7, "all-to-all": 7 / 8, "permute": 1}
    return sum(ring[kind] * ITEM[name] * math.prod(shape) for kind, name, shape in collectives(program))


@pytest.mark.slow
@pytest.mark.parametrize("make, vocab_size", [(on, 320), (with_encoder, 70)])
def test_the_compiled_step_sends_about_the_calculated_bytes(small, make, vocab_size):
    """Without `sharding.gather`, XLA also shards activations by their width and sends several times as many bytes."""
    mesh = MeshConfig(1, 8, 1)
    config = dataclasses.replace(make(small, mesh), context_length=128)
    total = sent_by_eight(compiled_step(config, vocab_size))
    cost = mesh_cost.cost(config, mesh_cost.abstract_state(config, vocab_size), mesh)
    # XLA gathers parameters once, not twice. On CPUs, an all-reduce with twice the bytes replaces a reduce-scatter.
    assert 0.9 < total / (cost["sent: parameters"] + cost["sent: gradients"]) < 1.4


@pytest.mark.slow
def test_the_compiled_step_of_an_encoder_sends_the_calculated_gradients(small):
    mesh = MeshConfig(8, 1, 1)
    config = with_encoder(small, mesh)
    total = sent_by_eight(compiled_step(config, 70))
    cost = mesh_cost.cost(config, mesh_cost.abstract_state(config, 70), mesh)
    second_gradient = 2 * 7 / 8 * 4 * 70 * config.model.d_model  # the look-ups of source and target are reduced apart
    assert total == pytest.approx(cost["sent: gradients"] + second_gradient, rel=1e-3)


@pytest.mark.slow
def test_the_compiled_step_of_an_encoder_reduces_the_calculated_activations(small):
    mesh = MeshConfig(1, 1, 8)
    config = with_encoder(small, mesh, model__position="none", train__batch_size=1)
    model, T, S = config.model, config.context_length, config.source_length
    reduced = [shape for kind, _, shape in collectives(compiled_step(config, 70)) if kind == "all-reduce"]
    tokens = sum(math.prod(shape) // model.d_model for shape in reduced if math.prod(shape) in (T * 32, S * 32))
    # XLA reduces the gradients of an input of several products (q, k and v; k and v; gate and up) one by one.
    apart = (2 + 1) * model.num_layers * T + ((2 + 1) * model.encoder_layers + model.num_layers) * S
    cost = mesh_cost.cost(config, mesh_cost.abstract_state(config, 70), mesh)
    assert (tokens - apart) * model.d_model * 2 * (2 * 7 / 8) == cost["sent: activations"]


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["num_layers", "encoder_layers"])
def test_the_activations_of_a_layer_are_a_close_lower_estimate(small, stack):
    """Compare with the memory of compiled steps of a float32 model, by the differences of layers and batch sizes."""
    width, heads, T, S = 64, 2, 32, 64
    sizes = {"model__d_model": width, "model__d_ff": 2 * width, "model__num_heads": heads, "model__activation": "gelu"}

    def layer(cost_of):
        """Return the cost of one more layer, for one sequence."""
        costs = {(layers, rows): cost_of({f"model__{stack}": layers}, rows) for layers in (2, 4) for rows in (16, 32)}
        return (costs[4, 32] - costs[2, 32] - costs[4, 16] + costs[2, 16]) / 2 / 16

    def config_of(fields, rows):
        lengths = {"context_length": T, "source_length": S, "train__batch_size": rows, "model__position": "none"}
        return with_encoder(small, MeshConfig(1, 1, 1), **sizes | lengths | fields)

    def held(fields, rows):
        return compiled_step(config_of(fields, rows), 70).memory_analysis().temp_size_in_bytes

    def calculated(fields, rows):
        config = config_of(fields, rows)
        return rows * mesh_cost.cost(config, mesh_cost.abstract_state(config, 70), MeshConfig(1, 1, 1))["activations"]

    norms = {"num_layers": 3 * T, "encoder_layers": 2 * S}[stack] * width
    pairs = {"num_layers": T * T + T * S, "encoder_layers": S * S}[stack] * heads
    values = layer(calculated) / 2 - norms  # the input of a norm has 4 bytes in the formula, the size of one value here
    measured = layer(held) / 4 - 3 * pairs
    assert 1 < measured / values < 1.4


def test_the_tables_of_the_presets_are_up_to_date():
    assert {path.stem for path in (REPOSITORY / "docs" / "sharding").glob("*.md")} == set(presets.SHAPES)
    for name in presets.SHAPES:
        written = (REPOSITORY / "docs" / "sharding" / f"{name}.md").read_text()
        config = loading.load(f"configs/presets.py:{name}", {"model.num_layers": 2})  # one row for all layers
        table = mesh_cost.parameter_table(mesh_cost.abstract_state(config, config.data.vocab_size))
        assert table in written, f"{name}: make sharding-tables"
    source = "configs/presets.py:gpt2_small"
    report = mesh_cost.report(source, loading.load(source), 50_257, f"--config={source}")
    assert (REPOSITORY / "docs" / "sharding" / "gpt2_small.md").read_text() == report + "\n", "make sharding-tables"


def test_the_page_names_the_arrays_of_the_optimizer(small):
    adamw, muon = (mesh_cost.report("a.py", small(optimizer__name=name), 257, "") for name in ("adamw", "muon"))
    assert "AdamW's two moments are sharded" in adamw and "Muon" not in adamw
    assert "Muon's momentum of the blocks' matrices, and AdamW's two moments of the other parameters, are" in muon


def test_the_tables_of_the_guide_are_up_to_date():
    guide = (REPOSITORY / "docs" / "scaling.md").read_text()
    for name in ("gpt2_small", "gpt3_xl", "llama2_7b"):
        written = (REPOSITORY / "docs" / "sharding" / f"{name}.md").read_text()
        (eight,) = re.findall(r"Eight devices:\n\n(.*?)\n\n", written, re.DOTALL)
        assert eight in guide, name


@pytest.mark.parametrize(
    "name, count",
    [
        # 50,257 + 2,048 rows of 2,048; 24 layers of 12 D² + 13 D (biases and norms); a last norm.
        ("gpt3_xl", (50_257 + 2_048) * 2_048 + 24 * (12 * 2_048**2 + 13 * 2_048) + 2 * 2_048),
        ("llama2_7b", 6_738_415_616),  # the count of the released weights
    ],
)
def test_parameter_counts_of_the_larger_presets(name, count):
    config = loading.load(f"configs/presets.py:{name}")
    shallow = [loading.override(config, {"model.num_layers": n}) for n in (1, 2)]
    layers = [mesh_cost.count(mesh_cost.abstract_state(c, c.data.vocab_size).parameters) for c in shallow]
    assert layers[0] + (config.model.num_layers - 1) * (layers[1] - layers[0]) == count
