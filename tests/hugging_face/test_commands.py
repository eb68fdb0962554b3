"""Export and import on the command line: python -m mini_gpt.hugging_face; and exports that are refused."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import architectures, exporting, model_card
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import overtake, type_in
from tests.conftest import SMALL
from tests.faults.test_commands import DAMAGED
from tests.hugging_face import models
from tests.hugging_face.bpe_tokenizers import foreign, like_robertas
from tests.hugging_face.models import T5, logits, written

# Export and import on the command line: python -m mini_gpt.hugging_face.

COMMAND = "mini_gpt.commands.hugging_face"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture
def run(directories, small):
    """Return the directory of a briefly trained run."""
    if not (directories / "run").exists():
        loop.train(small(model__position="learned", data__tokenizer="bpe", data__vocab_size=300), directories / "run")
    return directories / "run"


@pytest.fixture
def out(directories, run, monkeypatch):
    """Return the directory of the exported run."""
    if not (directories / "out").exists():
        assert type_in(monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={directories / 'out'}") is None
    return directories / "out"


@pytest.fixture
def imports(out, monkeypatch, corpus_files, tmp_path):
    """Return a function that imports the exported run; it takes further flags."""
    plain = {name: value for name, value in SMALL.items() if not name.startswith("model.") or name == "model.dtype"}
    plain |= {"data.path": corpus_files}
    flags = [f"--config.{name}={value}" for name, value in plain.items() if name != "context_length"]
    return lambda *more, workdir="again", source=out: type_in(
        monkeypatch, COMMAND, "import", f"--input={source}", f"--workdir={tmp_path / workdir}", *flags, *more
    )


def leaves(run):
    listed = jax.tree_util.tree_leaves_with_path(run.model.parameters)
    return {parameters.path_name(path): np.asarray(leaf) for path, leaf in listed}


@pytest.mark.slow
def test_an_exported_run_is_imported_again(run, out, imports, monkeypatch, tmp_path, capsys):
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert type_in(monkeypatch, "eval.py", f"--workdir={run}") is None  # with the mesh of the imported run
    card, score = (out / "README.md").read_text(), json.loads((run / "eval" / "perplexity.json").read_text())
    assert f"{score['nll']:.4f} nats per token" in card
    assert "| trained | 8 steps of 8 rows of 32 tokens, seed 0 |" in card
    assert imports() is None
    again = tmp_path / "again"
    assert type_in(monkeypatch, "eval.py", f"--workdir={again}") is None
    scored = json.loads((again / "eval" / "perplexity.json").read_text())
    assert scored == score | {"checkpoint_step": 0, "sha256": scored["sha256"]}
    capsys.readouterr()
    for workdir in (run, again):
        assert type_in(monkeypatch, "sample.py", f"--workdir={workdir}", "--prompt=the", "--length=9", "--json") is None
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    before, after = Run(run), Run(again)
    assert before.trained.model == after.trained.model


MASKED = {"model__causal": False, "train__objective": "masked", "model__norm_placement": "post"}
MASKED |= {"model__prediction_head": True, "model__embedding_norm": True, "model__position": "learned"}


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "characters"])
def test_an_exported_masked_run_is_imported_again(tokenizer, small, imports, monkeypatch, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    loop.train(small(data__tokenizer=tokenizer, data__vocab_size=300, **MASKED), run)
    assert type_in(monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={out}") is None
    card = (out / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "AutoModelForMaskedLM" in card and "| architecture | BERT, " in card
    assert imports(source=out) is None
    before, after = Run(run), Run(tmp_path / "again")
    assert before.trained.model == after.trained.model and after.trained.train.objective == "masked"
    for path, leaf in leaves(before).items():
        np.testing.assert_array_equal(leaves(after)[path], leaf, path)
    for workdir in (run, tmp_path / "again"):
        assert type_in(monkeypatch, "eval.py", f"--workdir={workdir}") is None
    scores = [json.loads((at / "eval" / "perplexity.json").read_text())["nll"] for at in (run, tmp_path / "again")]
    assert scores[0] == scores[1]
    message = type_in(
        monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={tmp_path}/new", "--architecture=roberta"
    )
    assert "pad_token_id: found" in message and "RoBERTa counts positions without padding" in message
    message = type_in(
        monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={tmp_path}/new", "--architecture=gpt2"
    )
    assert "model.causal: found False; must be True" in message and message.endswith("; --architecture=gpt2 needs this")


@pytest.mark.slow
def test_an_imported_roberta_keeps_its_ids(imports, monkeypatch, tmp_path):
    tokenizer, source = like_robertas(300), tmp_path / "roberta"
    rows = tokenizer.get_vocab_size()
    written("roberta", source, vocab_size=rows, end=rows - 1)  # the padding is token 3
    tokenizer.save(str(source / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<unk>", "mask_token": "<mask>"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    assert imports("--config.train.steps=1", source=source) is None
    run, tensors = Run(tmp_path / "again"), load_file(source / "model.safetensors")
    described = json.loads((source / "config.json").read_text())
    theirs = np.array([[*tokenizer.encode("the größer<mask>").ids]])
    assert 4 in theirs, "the mask token"
    assert run.tokenizer.encode("the größer")[:-1].tolist() == theirs[0, :-2].tolist()
    assert run.model.vocab_size == rows == len(run.tokenizer.token_bytes) and run.model.mask_id == 4
    expected_BLV = logits(source, theirs)
    found_BLV = run.model.merge()(jnp.asarray(theirs))
    np.testing.assert_allclose(found_BLV, expected_BLV, rtol=1e-4, atol=1e-4)
    for name, title in (("roberta", "RoBERTa"), ("bert", "BERT")):
        command = [
            "export",
            f"--workdir={tmp_path / 'again'}",
            f"--output={tmp_path / name}2",
            f"--architecture={name}",
        ]
        assert type_in(monkeypatch, COMMAND, *command) is None
        assert f"| architecture | {title}, 2 layers" in (tmp_path / f"{name}2" / "README.md").read_text()
    assert json.loads((tmp_path / "roberta2" / "config.json").read_text()) == described
    for name, tensor in load_file(tmp_path / "roberta2" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, tensors[name], name)
    np.testing.assert_allclose(logits(tmp_path / "bert2", theirs), expected_BLV, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_an_exported_encoder_decoder_is_imported_again(small, imports, monkeypatch, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    fields |= {f"model__{name}": value for name, value in (T5 | {"activation": "geglu", "d_model": 16}).items()}
    loop.train(small(**fields), run)
    assert type_in(monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={out}") is None
    card = (out / "README.md").read_text()
    assert "AutoModelForSeq2SeqLM" in card and "| architecture | T5, 2 + " in card
    message = imports(source=out)
    assert message.startswith("error: data.corpus: ") and "needs pairs: give --config.data.corpus=pairs" in message
    more = [f"--config.data.{name}={value}" for name, value in (("corpus", "task:copy"), ("task_length", 4))]
    assert imports(*more, "--config.data.path=None", "--config.context_length=32", source=out) is None
    before, after = Run(run), Run(tmp_path / "again")
    assert before.trained.model == after.trained.model
    for path, leaf in leaves(before).items():  # a width of 16 is a power of four, so that no factor is rounded
        np.testing.assert_array_equal(leaves(after)[path], leaf, path)
    for workdir in (run, tmp_path / "again"):
        assert type_in(monkeypatch, "eval.py", f"--workdir={workdir}", "--suite=tasks") is None


@pytest.mark.slow
def test_an_imported_run_trains_in_place_or_as_a_new_run(run, imports, monkeypatch, tmp_path):
    assert imports("--config.optimizer.learning_rate=1e-9") is None
    start = leaves(Run(run))
    config = f"--config={tmp_path / 'again' / 'config.json'}"
    more = ["--config.data.split=documents", "--config.train.steps=2"]
    origin = f"--init_from={tmp_path / 'again'}"
    assert type_in(monkeypatch, "train.py", config, origin, f"--workdir={tmp_path / 'tuned'}", *more) is None
    assert type_in(monkeypatch, "train.py", config, f"--workdir={tmp_path / 'again'}") is None
    command = ["export", f"--workdir={tmp_path / 'tuned'}", f"--output={tmp_path / 'out'}"]
    assert type_in(monkeypatch, COMMAND, *command) is None
    assert "| initial weights | those of the run again, step 0 |" in (tmp_path / "out" / "README.md").read_text()
    for workdir, step in (("tuned", 2), ("again", 8)):
        trained = Run(tmp_path / workdir)
        assert trained.step == step
        for path, leaf in leaves(trained).items():
            np.testing.assert_allclose(leaf, start[path], atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_exported_files_have_the_imported_ids(imports, monkeypatch, tmp_path):
    tokenizer, source = foreign(), tmp_path / "llama"
    written("llama", source, vocab_size=400, end=2)
    tokenizer.save(str(source / "tokenizer.json"))
    assert imports("--config.train.steps=1", "--config.context_length=8", source=source) is None
    run, tensors = Run(tmp_path / "again"), load_file(source / "model.safetensors")
    assert run.config.data.tokenizer == "bpe" and run.config.data.vocab_size == 400
    described = json.loads((source / "config.json").read_text())
    theirs = np.array([[*tokenizer.encode("the größer cat").ids, 2]])
    assert [*run.tokenizer.encode("the größer cat"), tokenizers.separator(run.tokenizer)] == theirs[0].tolist()
    model = run.model.merge()
    np.testing.assert_allclose(model(jnp.asarray(theirs)), logits(source, theirs), rtol=1e-4, atol=1e-4)
    command = ["export", f"--workdir={tmp_path / 'again'}", f"--output={tmp_path / 'back'}"]
    assert type_in(monkeypatch, COMMAND, *command) is None
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == described | {"pad_token_id": 2}
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, tensors[name], name)
    card = (tmp_path / "back" / "README.md").read_text()
    assert "| trained |" not in card and "| initial weights | those of llama, a Llama |" in card
    assert run.config.context_length < described["max_position_embeddings"]
    assert f"| context | {described['max_position_embeddings']} tokens |" in card


def test_a_model_card_has_no_damaged_result(tmp_path):
    run = SimpleNamespace(workdir=tmp_path, step=4, config=loading.load("configs/tiny.py", {}))
    path = tmp_path / "eval" / "perplexity.json"
    path.parent.mkdir()
    assert model_card._measured(run) == ""
    right = {"checkpoint_step": 4, "overrides": {}, "split": "test", "tokens_scored": 1000, "context_length": 32}
    right |= {"nll": 1.25, "bits_per_byte": 2.0}
    path.write_text(json.dumps(right))
    assert "On the test split of python_stdlib (1,000 tokens, in blocks of 32): 1.2500 nats" in model_card._measured(
        run
    )
    wrong = [json.dumps(right | {name: value}) for name in right for value in ([1], {"a": 1}, "x")]
    for content in [*wrong, *DAMAGED.values()]:
        path.write_bytes(content.encode(errors="surrogateescape"))
        assert model_card._measured(run) == "", content[:200]


@pytest.mark.slow
def test_of_two_writers_of_a_directory_the_second_is_refused(run, out, imports, monkeypatch, tmp_path):
    overtake(monkeypatch)
    refused = f"error: {tmp_path / 'new'}: exists already; name a new directory"
    assert type_in(monkeypatch, COMMAND, "export", f"--workdir={run}", f"--output={tmp_path}/new") == refused
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["of another process"]
    (tmp_path / "new" / "of another process").unlink()
    (tmp_path / "new").rmdir()
    assert imports(workdir="new") == refused
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["of another process"]
    assert not list(tmp_path.glob("*.draft"))


def test_errors_are_one_line_and_nothing_is_written(run, out, imports, monkeypatch, tmp_path):
    export = lambda *flags: type_in(monkeypatch, COMMAND, "export", *flags)
    assert export(f"--workdir={run}", f"--output={out}") == f"error: {out}: exists already; name a new directory"
    message = export(f"--workdir={run}", f"--output={tmp_path / 'new'}", "--checkpoint=3")
    assert message == "error: --checkpoint: found '3'; must be last, best or one of 4, 8"
    assert "--fast: no such flag" in export(f"--workdir={run}", f"--output={tmp_path / 'new'}", "--fast")
    assert export(f"--workdir={run}", f"--output={tmp_path}/new/..").startswith(f"error: {tmp_path}: exists already")
    assert imports(workdir="new/../there/..").startswith(f"error: {tmp_path}: exists already")
    assert not (tmp_path / "new").exists()

    (tmp_path / "there").mkdir()
    assert imports(workdir="there") == f"error: {tmp_path / 'there'}: exists already; name a new directory"
    message = imports("--config.model.d_model=64")
    assert message == "error: model.d_model: found 64; the imported model has 32"
    message = imports("--config.context_length=64")
    assert "context_length: found 64; learned positions end at model.max_positions (32)" in message
    assert "config.json: not found; name a directory that holds" in imports(source=tmp_path)
    (tmp_path / "sentences" / "0_Transformer").mkdir(parents=True)
    (tmp_path / "sentences" / "0_Transformer" / "config.json").touch()
    assert "config.json: not found; name" in (message := imports(source=tmp_path / "sentences"))
    assert message.endswith(f"{tmp_path / 'sentences' / '0_Transformer'}")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in out.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[: -9 if file.suffix == ".safetensors" else None])
    assert "model.safetensors: not a complete safetensors file" in imports(source=damaged)
    described = json.loads((out / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(described | {"eos_token_id": 999}))
    assert "eos_token_id: found 999; must be the id of the token" in imports(source=damaged)
    assert "found the config of a run of mini_gpt; it needs no import" in imports(source=run)
    assert "found a model of Transformers; python -m" in type_in(monkeypatch, "eval.py", f"--workdir={out}")
    assert not (tmp_path / "again").exists()


# Models that no architecture of Transformers can express are refused by the fields' names.

without = lambda fields, name: {other: value for other, value in fields.items() if other != name}
BERT, RELU_T5 = models.BERT, models.T5 | {"activation": "relu"}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu"}
MPT = {"position": "alibi", "activation": "gelu_exact"}
# Fields of a model, of which the last can't be exported.
REFUSED = [
    {"norm": "rmsnorm", "position": "kerple"},
    {"position": "relative_logits"},
    {"position": ("none", "alibi")},
    {"position": ("rope", "t5")},
    {"position": "none", "norm": "rmsnorm"},
    {"position": "none", "random_positions": 512},
    {"position": "sinusoidal", "attention_window": 8},
    {"parallel_residual": "one_norm"},
    {"position": "rope", "head_width": 8},
    LLAMA | {"position": "rope", "heads": ((0, 1), (3,), (2,), (1,))},
    {"position": "rope", "rope.base": (9.0, 99.0)},
    {"rope.scaling": "linear", "rope.factor": (1.0, 4.0)},
    {"rope.factor": 2, "rope.scaling": "yarn"},
    {"position": "rope", "rope.factor": 2, "rope.fraction": 0.5, "rope.scaling": "yarn_by_index"},
    {"position": "rope", "parallel_residual": "two_norms", "rope.turning": 0.5},
    {"position": "rope", "activation": "swiglu"},
    {"position": "rope", "variants.qk_norm": "plain"},
    {"position": "rope", "variants.differential": True},
    {"position": "rope", "variants.latent": 16},
    {"position": "learned", "num_kv_heads": 2},
    {"position": "learned", "residual": False},
    {"position": "learned", "scale_width": 9.0},
    {"position": "learned", "variants.clip_qkv": 9.0},
    {"position": "learned", "scale_attention": False},
    LLAMA | {"activation": "gelu"},
    LLAMA | {"rope.fraction": 0.5},
    LLAMA | {"rope.scaling": "ntk", "rope.factor": 2.0, "rope.turning": 0.5},
    {"position": "alibi", "output_soft_cap": 9.0},
    {"position": "alibi", "activation": "gelu"},
    MPT | {"use_bias": True},
    MPT | {"alibi_exponent": 16.0},
    MPT | {"use_bias": False, "d_ff": 100},
    BERT | {"norm": "rmsnorm"},
    without(BERT, "prediction_head") | {"prediction_head": False},
    without(BERT, "position") | {"position": "rope"},
    without(RELU_T5, "position") | {"position": ("t5", "none")},
    RELU_T5 | {"share_embeddings": False},
]


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: str([*given.items()][-1]))
def test_models_that_no_architecture_supports_are_refused(given):
    name, value = [*given.items()][-1]
    fields = {f"model.{name}": value for name, value in given.items()}
    further = models.FURTHER["bert"] if fields.get("model.causal") is False else {}
    further |= models.TASK if "model.encoder_layers" in fields else {}
    config = loading.load("configs/default.py", fields | further)
    with pytest.raises(UserError, match=re.escape(f"model.{name}: found {value!r}")):
        architectures.choose(config.model)


def test_position_ids_of_a_task_are_refused(tmp_path):
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "data.position_ids": "coupled"}
    config, drawn = models.make("learned", **fields)
    definition, mesh = build.abstract(config.model, models.VOCAB)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    with pytest.raises(UserError, match=r"^data.position_ids: found 'coupled'; must be sequence to be exported$"):
        exporting.write_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nanochat_is_refused_with_a_factor_of_queries_and_keys():
    preset, factor = (
        "configs/presets.py:nanochat_d20",
        {"model.rope.scaling": "yarn_by_index", "model.rope.factor": 2.0},
    )
    right, yarn = (loading.load(preset, fields).model for fields in ({}, factor))
    assert architectures.choose(right, {}, "nanochat").title == architectures.choose(right).title == "NanoChat"
    with pytest.raises(UserError, match=r"^model\.rope\.scaling: found 'yarn_by_index'; must be none or linear"):
        architectures.choose(yarn, {}, "nanochat")
