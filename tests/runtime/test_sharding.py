"""The mesh and the sharding rules: equal results on every mesh, sizes of shards, and one-line errors."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.data import batches
from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import train_state
from mini_gpt.training.step import make_step
from tests.training.test_step import VOCAB, assert_close, make_batch

MESHES = [(2**i, 2**j, 2 ** (3 - i - j)) for i in range(4) for j in range(4 - i)]
QUICK = [(2, 2, 2)]
SMALL_MODEL = {
    "context_length": 8,
    "model__num_heads": 8,
    "model__d_model": 16,
    "model__d_ff": 32,
    "model__dropout": 0.2,
    "model__activation": "swiglu",
    "model__tie_embeddings": False,
    "model__position": "learned",
}


def config_on(small, mesh):
    return small(**SMALL_MODEL, **dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), mesh, strict=True)))


def abstract_state(config):
    return train_state.abstract(config, VOCAB, sharding.make_mesh(*config.mesh.sizes))[1]


def first_state(config):
    return train_state.first(config, VOCAB, abstract_state(config))


def train(config, state, layout=PLAIN):
    mesh = sharding.make_mesh(*config.mesh.sizes)
    definition, places = train_state.abstract(config, VOCAB, mesh)
    step, history = make_step(definition, config, places, layout), []
    for number in range(3):
        state, metrics = step(state, sharding.put_batch(make_batch(config, number), mesh))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


def on_one_and_eight(small, fields, layout=PLAIN):
    """Return the last state and the metrics of a run on one device, and of one on eight devices."""
    runs = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        sizes = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), mesh, strict=True))
        config = small(**SMALL_MODEL | fields, **sizes)
        runs.append(train(config, first_state(config), layout))
    return runs


def test_the_tensor_axis_need_not_divide_the_state_of_a_recurrence(small):
    state = first_state(config_on(functools.partial(small, model__block="gru"), (2, 2, 2)))
    assert state.parameters["blocks"][0]["recurrence"]["out"]["kernel"].shape == (11, 16)


@pytest.fixture(scope="module")
def one_device():
    """Return a dict that caches the results of one device: the first state, the last state and the metrics."""
    return {}


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, id=str(mesh), marks=() if mesh in QUICK else pytest.mark.slow) for mesh in MESHES]
)
def test_eight_devices_equal_one_on_every_mesh(small, mesh, one_device):
    if not one_device:
        config = config_on(small, (1, 1, 1))
        one_device["first"] = jax.tree.map(np.asarray, first_state(config))
        one_device["last"], one_device["history"] = train(config, first_state(config))
    config = config_on(small, mesh)
    if mesh == (2, 2, 2):  # initialized on this mesh; other meshes get a copy, which compiles nothing
        first = first_state(config)
        assert_close(first, one_device["first"], tolerance=0)
    else:
        first = jax.device_put(one_device["first"], jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config)))
    many, history = train(config, first)
    assert_close(many, one_device["last"])
    assert_close(history, one_device["history"])

    # The number of shards of each array, written out by hand. Each device holds one of them.
    _, fsdp, tensor = mesh
    parts = {
        "attention/query/kernel": fsdp * tensor,
        "attention/key/bias": tensor,
        "attention/out/kernel": fsdp * tensor,
        "attention/out/bias": 1,
        "mlp/gate/kernel": fsdp * tensor,
        "mlp/up/bias": tensor,
        "mlp/down/kernel": fsdp * tensor,
        "mlp_norm/scale": 1,
        "embedding": fsdp,
    }
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path((many.parameters, many.optimizer_state)):
        assert len(leaf.addressable_shards) == 8
        name = next((name for name in parts if parameters.path_name(path).endswith(name)), None)
        seen.add(name)
        if name:
            assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // parts[name]}, name
    assert seen >= set(parts)


VARIANTS = {"qk_norm": "weighted", "query_scale": "ssmax", "soft_cap": 2.0, "sink": "trained", "gate": "head"}
VARIANTS |= {"canon": True, "selective": True}


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_blockwise_attention_and_bfloat16_equal_one_device(small, dtype, tolerance):
    fields = {"model__attention": "blockwise", "model__position": "t5", "model__dtype": dtype, "model__dropout": 0.0}
    (_, single), (_, several) = on_one_and_eight(small, fields)
    assert several == [pytest.approx(metrics, rel=tolerance) for metrics in single]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    "position", ["fire", "pope", "fox", "cope", "relative_logits", "accumulated", "path", "sticks"]
)
def test_variants_of_attention_equal_one_device(small, scan, position):
    variants = {"normaliser": "stick_breaking"} if position == "sticks" else VARIANTS
    variants = VARIANTS | {"soft_cap": None} if position == "path" else variants
    fields = {f"model__variants__{name}": value for name, value in variants.items()}
    fields |= {"model__position": "rope" if position == "sticks" else position, "model__scan_layers": scan}
    fields |= {"model__dropout": 0.0, "model__dtype": "float32"}
    (_, single), (_, several) = on_one_and_eight(small, fields)
    assert several == [pytest.approx(metrics, rel=1e-4) for metrics in single]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{"differential": True}, {"latent": 8}], ids=str)
def test_variants_of_values_equal_one_device(small, variant):
    fields = {f"model__variants__{name}": value for name, value in variant.items()}
    fields |= {"model__dropout": 0.0, "model__dtype": "float32", "model__position": "rope", "model__head_width": 4}
    (_, single), (_, several) = on_one_and_eight(small, fields)
    assert several == [pytest.approx(metrics, rel=1e-4) for metrics in single]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["BERT", "Phi", "Gemma", "OLMo 2"])
def test_fields_of_published_models_equal_one_device(small, name, tied):
    fields = {"model__prediction_head": True, "model__embedding_norm": True, "model__norm_placement": "post"}
    if name == "Phi":
        fields = {"model__output_bias": True, "model__parallel_residual": "one_norm", "model__head_width": 6}
        fields |= {"model__qkv_bias": False}
    if name == "Gemma":
        fields = {"model__output_norm": True, "model__output_soft_cap": 2.0, "model__scale_width": 5.0}
    if name == "OLMo 2":
        fields = {"model__output_norm": True, "model__norm_placement": "none", "model__variants__clip_qkv": 0.05}
        fields |= {"model__variants__qk_norm": "all_heads"}
    fields |= {"model__tie_embeddings": tied, "model__dtype": "float32", "model__activation": "gelu"}
    (_, single), (_, several) = on_one_and_eight(small, fields)
    assert_close(single, several)


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["abacus", "coupled"])
def test_position_ids_with_random_offsets_equal_one_device(small, ids):
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__position_ids": ids}
    fields |= {"train__random_offsets": 40, "model__dtype": "float32"}
    assert_close(*on_one_and_eight(small, fields, Layout(None, operator_ids=(5, 9))))


ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}
# Share of an array's bytes that each of eight devices sends in a ring; for reduce-scatter, of the scattered array's.
RING_OF_EIGHT = {"all-gather": 7 / 8, "all-reduce": 2 * 7 / 8, "reduce-scatter": 7, "all-to-all": 7 / 8, "permute": 1}


def sent_bytes(program):
    """Return the bytes that a device sends in a compiled program for eight devices."""
    collective = r"= (\S+|\(.*?\)) (?:collective-)?(all-\w+|reduce-scatter|permute)(?:-start)?\("
    sent = 0
    for arrays, kind in re.findall(collective, program.as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", arrays):
            sent += RING_OF_EIGHT[kind] * ITEM_BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
    return sent


WITH_ENCODER = {
    "data__corpus": "task:copy",
    "data__tokenizer": "characters",
    "data__task_length": 4,
    "model__encoder_layers": 3,
    "model__num_layers": 2,
    "source_length": 96,
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, WITH_ENCODER], ids=["decoder", "encoder"])
def test_fsdp_sends_parameters_and_not_activations(small, fields):
    """Without `layers.gather`, XLA also shards activations by their width and sends several times as many bytes."""
    shape = {"model__num_heads": 8, "model__activation": "swiglu", "model__tie_embeddings": False}
    config = small(mesh__data=1, mesh__fsdp=8, **{"context_length": 128} | shape | fields)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    definition, abstract = train_state.abstract(config, 320, mesh)
    rows = sharding.batch_sharding(mesh)
    shapes = batches.shapes(config).items()
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=rows) for name, (shape, kind) in shapes}
    sent = sent_bytes(make_step(definition, config, abstract).lower(abstract, batch).compile())
    # All-gathers for the forward and the backward pass, and a reduce-scatter of gradients. XLA gathers once, not twice.
    # On CPUs, an all-reduce with twice the bytes replaces the reduce-scatter.
    leaves = jax.tree.leaves(abstract.parameters)
    sharded_bytes = 4 * sum(leaf.size for leaf in leaves if "fsdp" in leaf.sharding.spec)
    replicated_bytes = 4 * parameters.count(abstract.parameters) - sharded_bytes
    assert 0.9 < sent / (3 * 7 / 8 * sharded_bytes + 2 * 7 / 8 * replicated_bytes) < 1.4


def test_a_batch_is_sharded_by_rows(small):
    for mesh in ((2, 2, 2), (1, 4, 2)):
        config = config_on(small, mesh)
        batch = make_batch(config)
        put = sharding.put_batch(batch, sharding.make_mesh(*config.mesh.sizes))
        rows = 8 // (mesh[0] * mesh[1])
        assert {shard.data.shape for shard in put["inputs"].addressable_shards} == {(rows, 8)}
        np.testing.assert_array_equal(put["inputs"], batch["inputs"])
        from_global = sharding.put_whole(batch, sharding.make_mesh(*config.mesh.sizes))
        assert from_global["inputs"].sharding == put["inputs"].sharding
        np.testing.assert_array_equal(from_global["targets"], batch["targets"])


@pytest.mark.parametrize(
    "order, shape, hosts",
    [
        (range(8), (8, 1, 1), {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}),
        (range(8), (2, 2, 2), {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}),
        ((0, 4, 1, 5, 2, 6, 3, 7), (2, 2, 2), {0: range(8), 1: range(8)}),  # tensor across hosts: all rows on both
        ((0, 1, 4, 5, 2, 3, 6, 7), (4, 1, 2), {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}),  # a possible order on a torus
    ],
    ids=str,
)
def test_a_host_reads_the_rows_of_its_own_devices(monkeypatch, order, shape, hosts):
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(shape), sharding.AXES)
    place = type(sharding.batch_sharding(mesh))
    all_indices = place.addressable_devices_indices_map
    for host, rows in hosts.items():

        def own(self, size, host=host):
            return {device: index for device, index in all_indices(self, size).items() if device.id // 4 == host}

        with monkeypatch.context() as patch:
            patch.setattr(place, "addressable_devices_indices_map", own)
            assert sharding.host_rows(8, mesh) == list(rows)


def test_every_parameter_has_a_sharding_rule(small):
    for position in ENCODINGS:
        for extra in (
            {},
            {"model__activation": "swiglu", "model__tie_embeddings": False, "model__norm_placement": "post"},
            {"model__prediction_head": True, "model__embedding_norm": True, "model__activation": "relu"},
            {"model__output_bias": True, "model__parallel_residual": "one_norm"},
            {f"model__variants__{name}": VARIANTS[name] for name in VARIANTS if position not in ("hard_alibi", "path")},
            {"model__variants__differential": True},
            {"model__variants__latent": 8} if position == "none" else {},
        ):
            _, shapes = build.abstract(small(model__position=position, **extra).model, VOCAB)
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
                sharding.rule(parameters.path_name(path))
    with pytest.raises(KeyError, match="blocks/0/mystery"):
        sharding.rule("blocks/0/mystery")


@pytest.mark.parametrize("mesh", [(1, 1, 1), (16, 1, 1), (-1, 3, 1), (-1, 16, 1), (2, 2, 1)])
def test_a_mesh_of_a_wrong_number_of_devices_is_refused(mesh):
    product = " × ".join(map(str, mesh))
    message = f"^mesh: found data × fsdp × tensor = {product}, and this job has 8 devices; the product must be that"
    with pytest.raises(UserError, match=message):
        sharding.make_mesh.__wrapped__(*mesh)


@pytest.mark.parametrize(
    "asked, devices, mesh",
    [
        ((4, 1, 1), 8, (8, 1, 1)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((2, 2, 2), 1, (1, 1, 1)),
        ((1, 8, 1), 4, (1, 4, 1)),
        ((1, 2, 4), 6, (3, 2, 1)),
    ],
)
def test_the_reading_mesh_uses_all_visible_devices(small, monkeypatch, asked, devices, mesh):
    here = jax.devices()[:devices]
    monkeypatch.setattr(jax, "devices", lambda: here)
    assert tuple(sharding.make_reading_mesh(*config_on(small, asked).mesh.sizes[1:]).shape.values()) == mesh


def test_a_size_that_the_mesh_does_not_divide_is_named():
    fields = {"model.num_heads": 6, "model.d_model": 96, "mesh.fsdp": 3, "mesh.tensor": 4}
    with pytest.raises(UserError, match=r"^model\.num_heads: found 6; must be divisible by mesh\.tensor \(4\)$"):
        loading.load("configs/default.py", fields)
    fits = {"model.num_heads": 8, "model.num_kv_heads": 4, "model.d_model": 96, "mesh.fsdp": 3, "mesh.tensor": 4}
    assert loading.load("configs/default.py", fits).mesh.tensor == 4


def test_the_next_batch_is_prefetched():
    mesh = sharding.make_mesh(4, 2, 1)
    asked = []
    batches = ({"inputs": np.full((8, 3), asked.append(step) or step)} for step in range(3))
    seen = []
    for batch in sharding.prefetch_to_device(batches, mesh):
        assert batch["inputs"].sharding == sharding.batch_sharding(mesh)
        seen.append((int(batch["inputs"][0, 0]), list(asked)))
    assert seen == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])]
    assert list(sharding.prefetch_to_device([], mesh)) == []
