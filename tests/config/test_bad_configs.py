"""Bad values and mistakes in config files are refused in one line that names the field or file."""

import pytest

from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError

HARD = {"model.position": "hard_alibi"}
RECURRENT = {"model.block": "gru", "model.position": "none"}
COPY = {"data.corpus": "task:copy", "data.tokenizer": "characters"}
MASKED = {"train.objective": "masked", "model.causal": False}
ENCODER = {"model.encoder_layers": 1}
SPANS = ENCODER | {"train.objective": "span_corruption"}
PAIRS = ENCODER | {"data.corpus": "pairs", "data.path": "pairs.tsv"}
BAD = [
    ({"model.num_layer": "3"}, r"^model\.num_layer: no such config field; did you mean model\.num_layers\?$"),
    ({"modle.num_layers": "3"}, r"did you mean model\.num_layers"),
    ({"zzz": 1}, r"^zzz: no such config field; python -m mini_gpt\.config lists all fields$"),
    ({"base": 1}, r"did you mean model\.rope\.base or model\.sinusoidal\.base\?$"),
    ({"model": 1}, r"^model: no such config field; it is a section, with the fields position, .* rope\.base"),
    ({"optimiser.learning_rat": 1}, r"did you mean optimizer\.learning_rate\?$"),
    ({"attention_windwo": 1}, r"did you mean model\.attention_window\?$"),
    ({"train.steps": "many"}, r"^train\.steps: found 'many'; must be a whole number below 2\*\*31$"),
    ({"train.steps": 1.5}, "must be a whole number"),
    ({"train.steps": True}, "must be a whole number"),
    ({"optimizer.learning_rate": "fast"}, r"optimizer\.learning_rate: found 'fast'; must be a number"),
    ({"model.use_bias": "maybe"}, r"model\.use_bias: found 'maybe'; must be true or false"),
    ({"model.norm": "batchnorm"}, r"model\.norm: found 'batchnorm'; must be one of layernorm, rmsnorm"),
    ({"data.split_fractions": (0.5, 0.5)}, r"must be a tuple of 3"),
    ({"data.split_fractions": (0.5, 0.6, 0.1)}, "sum to 1"),
    ({"model.d_model": 130}, r"model\.d_model: found 130; must be divisible by model\.num_heads \(4\)"),
    ({"model.d_model": 100, "model.num_heads": 12}, r"^model\.d_model: found 100; must .* model\.num_heads \(12\)$"),
    ({"model.num_kv_heads": 3}, r"model\.num_kv_heads: found 3; must divide model\.num_heads \(4\)"),
    ({"model.d_model": 12}, r"rope needs an even number of rotated dimensions, at least 2"),
    ({"model.position": "roap"}, r"did you mean rope\?"),
    ({"model.position": ("rope", "learned")}, "learned acts once at the input and can't be part of a pattern"),
    ({"model.position": ("sinusoidal", "none")}, "sinusoidal acts once at the input"),
    ({"model.position": ("rope",) * 5}, r"must not be longer than model\.num_layers \(4\)"),
    ({"model.position": ()}, "at least one"),
    ({"model.variants.differential": True, "model.scan_layers": True}, r"needs model\.scan_layers=False"),
    ({"model.variants.differential": True, "model.num_kv_heads": 1}, r"num_kv_heads: found 1; must be even"),
    ({"model.variants.latent": 8, "model.num_kv_heads": 2}, r"latent: found 8; needs model\.num_kv_heads=4"),
    ({"model.variants.latent": 8, "model.position": "alibi"}, r"latent: found 8; needs model\.position=rope or none"),
    ({"model.variants.canon": True, "model.causal": False}, r"canon: found True; needs model\.causal=True"),
    ({"model.position": ("rope", "fox"), "model.causal": False}, r"model\.position: .*; needs model\.causal=True"),
    (
        {"model.variants.normaliser": "stick_breaking", "model.variants.sink": "zero"},
        r"model\.variants\.normaliser: found 'stick_breaking'; needs model\.variants\.sink=none",
    ),
    (
        {"model.position": ("pope", "rope"), "model.rope.base": (10.0, 100.0)},
        r"model\.rope\.base: found \(10\.0, 100\.0\); must be one number with pope",
    ),
    ({"model.attention_window": ()}, "at least one"),
    ({"model.share_embeddings": False}, r"^model\.share_embeddings: found False; needs an encoder: set"),
    (
        {"model.parallel_residual": "one_norm", "model.norm_placement": "post"},
        r"^model\.parallel_residual: found 'one_norm'; needs model\.norm_placement=pre$",
    ),
    (
        {"model.parallel_residual": "two_norms", "model.residual": False},
        r"^model\.parallel_residual: found 'two_norms'; needs model\.residual=True$",
    ),
    ({"model.norm_placement": "none", "model.parallel_residual": "one_norm"}, r"needs model\.norm_placement=pre$"),
    (
        {"model.block": "gru"},
        r"^model\.position: found 'rope'; must be none, or added to the embeddings, with model\.block=gru$",
    ),
    (RECURRENT | {"model.causal": False}, r"^model\.block: found 'gru'; needs model\.causal=True$"),
    (RECURRENT | {"model.encoder_layers": 2}, r"^model\.block: found 'gru'; needs model\.encoder_layers=0$"),
    (RECURRENT | {"model.attention_window": 4}, r"needs model\.attention_window=None$"),
    (RECURRENT | {"model.variants.soft_cap": 2.0}, r"needs model\.variants\.soft_cap=None$"),
    (RECURRENT | {"model.attention": "cudnn"}, r"^model\.block: found 'gru'; needs model\.attention=auto$"),
    (RECURRENT | {"model.attention_dropout": 0.5}, r"needs model\.attention_dropout=0\.0$"),
    (RECURRENT | {"model.attention_out_bias": False}, r"needs model\.attention_out_bias=True$"),
    (RECURRENT | {"model.qkv_bias": False}, r"needs model\.qkv_bias=True$"),
    (RECURRENT | {"model.scale_attention": False}, r"needs model\.scale_attention=True$"),
    (RECURRENT | {"model.scale_width": 2.0}, r"needs model\.scale_width=32$"),
    (
        {"model.position": "sinusoidal", "model.sinusoidal.columns": 128},
        r"must be less than model\.d_model=128$",
    ),
    ({"model.output_soft_cap": 0.0}, r"^model\.output_soft_cap: found 0\.0; must be above 0"),
    ({"model.scale_width": 0.0}, r"^model\.scale_width: found 0\.0; must be above 0"),
    ({"model.variants.clip_qkv": -1.0}, r"^model\.variants\.clip_qkv: found -1\.0; must be above 0"),
    ({"model.variants.qk_norm_epsilon": 0.1}, r"^model\.variants\.qk_norm_epsilon: found 0\.1; must be in 1e-15"),
    ({"model.head_width": 0}, r"^model\.head_width: found 0; must be"),
    ({"model.head_width": 7}, r"^model\.head_width: found 7; rope needs an even number of rotated dimensions"),
    ({"model.cross_positions": True}, r"^model\.cross_positions: found True; needs an encoder: set"),
    (
        {"model.cross_positions": True, "model.encoder_layers": 4, "model.position": "learned"},
        r"^model\.cross_positions: found True; must be False with model\.position=learned$",
    ),
    ({"model.rope.base": ()}, "at least one"),
    (HARD | {"model.variants.selective": True}, r"found 'hard_alibi'; needs model\.variants\.selective=False$"),
    ({"model.position": "pope", "model.rope.fraction": 0.5}, r"found 'pope'; needs model\.rope\.fraction=1$"),
    ({"model.attention_window": (8, 0)}, r"model\.attention_window: found \(8, 0\); must be in 1\.\.16777216, or None"),
    ({"model.attention_window": (8,) * 5}, r"attention_window: .* must not be longer than model\.num_layers \(4\)"),
    ({"model.rope.base": (100.0, 1.0)}, r"model\.rope\.base: found \(100\.0, 1\.0\); must be above 1"),
    (
        {"model.position": ("rope", "none"), "model.rope.base": (9.0, 99.0, 9.0), "model.scan_layers": True},
        r"num_layers: found 4; .* must be divisible by 6",
    ),
    ({"model.dtype": "float16"}, r"model\.dtype: found 'float16'; must be one of auto, float32, bfloat16"),
    ({"model.norm_epsilon": 0.0}, r"model\.norm_epsilon: found 0\.0; must be in 1e-15\.\.0\.01"),
    ({"model.norm_epsilon": 0.1}, r"model\.norm_epsilon: found 0\.1; must be in 1e-15\.\.0\.01"),
    ({"model.embedding_norm": 2}, r"model\.embedding_norm: found 2; must be true or false"),
    (
        {"model.prediction_head": True, "model.output_bias": True},
        r"^model\.prediction_head: found True; needs model\.output_bias=False$",
    ),
    (
        {"model.prediction_head": True, "model.activation": "geglu"},
        r"model\.prediction_head: found True; must be False with model\.activation=geglu",
    ),
    ({"model.causal": False}, r"must be masked: with model\.causal=False a token attends to its target"),
    ({"train.objective": "masked"}, r"set model\.causal=False"),
    ({"model.dropout": 1.0}, r"model\.dropout: found 1\.0; must be in \[0, 1\)"),
    ({"train.lora_layers": "("}, r"train\.lora_layers: found '\('; must be a regular expression"),
    ({"model.num_heads": 10**6, "model.d_model": 10**6}, r"model\.num_heads: found 1000000; must be in 1\.\.4096"),
    ({"model.num_layers": 0}, r"model\.num_layers: found 0; must be in 1\.\.4096"),
    ({"train.label_smoothing": -0.1}, r"must be in \[0, 1\)"),
    ({"train.batch_size": 10, "train.accumulation_steps": 4}, r"must be divisible by train\.accumulation_steps \(4\)"),
    ({"optimizer.warmup_steps": 0}, "inverse_sqrt needs at least 1"),
    ({"model.position": "learned", "model.max_positions": 9}, r"context_length: found 256; learned .* \(9\)"),
    (
        {"model.rope.scaling": "yarm"},
        r"model\.rope\.scaling: found 'yarm'; must be one of none, linear, ntk, dynamic, yarn",
    ),
    ({"model.rope.factor": (1.0, 0.5), "model.rope.scaling": "linear"}, r"rope\.factor: found \(1\.0, 0\.5\); must be"),
    ({"model.rope.factor": (1.0, 1.0), "model.rope.scaling": "ntk"}, r"rope\.factor: .* changes nothing with it"),
    ({"model.rope.factor": (1.0, 2.0), "model.rope.scaling": "dynamic"}, r"rope\.factor: .*; must be one number with"),
    ({"model.rope.factor": ()}, "at least one"),
    ({"model.rope.factor": 0.5}, r"model\.rope\.factor: found 0\.5; must be at least 1"),
    ({"model.rope.scaling": "linear"}, r"model\.rope\.factor: found 1\.0; model\.rope\.scaling=linear changes nothing"),
    ({"model.rope.beta_slow": 0.0}, r"model\.rope\.beta_slow: found 0\.0; must be above 0"),
    (
        {"model.rope.beta_fast": 1.0},
        r"model\.rope\.beta_fast: found 1\.0; must be above model\.rope\.beta_slow \(1\.0\)",
    ),
    ({"model.rope.turning": 0.01}, r"model\.rope\.turning: found 0\.01; none of the 16 pairs of dimensions would turn"),
    ({"model.d_model": 4, "model.num_heads": 4}, r"model\.d_model: found 4; rope needs an even number of rotated"),
    (
        {"model.position": ("fire", "rope"), "model.scan_layers": True},
        r"model\.position: found \('fire', 'rope'\); with model\.scan_layers, fire has parameters in each layer",
    ),
    (
        {"model.position": ("rope", "kerple"), "optimizer.name": "muon"},
        r"optimizer\.name: found 'muon'; must be adamw: model\.position is a pattern with kerple",
    ),
    (HARD | {"model.hard_alibi.heads": 5}, r"hard_alibi\.heads: found 5; must be at most model\.num_heads \(4\)"),
    (HARD | {"model.random_positions": 512}, r"found 'hard_alibi'; needs model\.random_positions=None$"),
    (HARD | {"model.variants.query_scale": "ssmax"}, r"query_scale: found 'ssmax'; hard_alibi has heads that see"),
    ({"model.variants.soft_cap": 0.0}, r"model\.variants\.soft_cap: found 0\.0; must be above 0, or None"),
    ({"model.rope.original_context": 0}, r"model\.rope\.original_context: found 0; must be at least 1"),
    (
        {"model.rope.scaling": "ntk", "model.rope.factor": 2.0, "model.d_model": 8},
        r"model\.rope\.scaling: found 'ntk'; needs more than one pair of dimensions",
    ),
    (
        {"model.position": ("rope", "accumulated"), "model.rope.scaling": "yarn", "model.rope.factor": 4.0},
        r"model\.position: found \('rope', 'accumulated'\); needs model\.rope\.scaling=none$",
    ),
    ({"model.attention_window": 0}, r"model\.attention_window: found 0; must be in 1\.\.16777216, or None"),
    ({"model.random_positions": 200}, r"model\.random_positions: found 200; must be at least context_length \(256\)"),
    (
        {"model.position": "learned", "model.random_positions": 900, "model.max_positions": 300},
        r"model\.random_positions: found 900; learned positions end at model\.max_positions \(300\)",
    ),
    ({"data.corpus": "task:copy"}, r"data\.tokenizer: found 'bytes'; the tasks have a fixed vocabulary: must be char"),
    ({"data.tokenizer": "bpe", "data.vocab_size": 257}, r"data\.vocab_size: found 257; must be above 257, for bytes"),
    ({"data.task_length": 0}, r"data\.task_length: found 0; must be at least 1"),
    (COPY | MASKED, r"data\.isolate_documents: found False; must be True for a task with masked answers"),
    (
        {"data.isolate_documents": True, "model.rope.scaling": "dynamic", "model.rope.factor": 4.0},
        r"data\.isolate_documents: found True; must be False with model\.rope\.scaling=dynamic",
    ),
    ({"data.position_ids": "coupled"}, r"data\.position_ids: found 'coupled'; must be sequence, because .* not a task"),
    (COPY | {"data.position_ids": "abacus"}, r"position_ids: found 'abacus'; needs model\.position=learned"),
    ({"data.corpus": "text"}, r"data\.path: found None; data\.corpus=text needs a glob"),
    ({"optimizer.learning_rate": "1e999"}, r"optimizer\.learning_rate: found inf; must be a number"),
    ({"model.position": ("rope",) * 3, "model.scan_layers": True}, r"num_layers: found 4; .* must be divisible by 3"),
    ({"optimizer.muon.adam_learning_rate": 0.0}, r"muon\.adam_learning_rate: found 0\.0; must be above 0, or None"),
    ({"optimizer.muon.newton_schulz_steps": 0}, r"muon\.newton_schulz_steps: found 0; must be at least 1"),
    ({"mesh.data": 0}, r"mesh\.data: found 0"),
    ({"seed": -1}, "seed: found -1"),
    ({"seed": "{[]: 1}"}, r"^seed: found '\{\[\]: 1\}'; must be a whole number"),
    ({"model.max_positions": 2**31 - 1}, r"^model\.max_positions: found 2147483647; must be in 1\.\.16777216"),
    ({"seed": 2**31}, r"^seed: found 2147483648; must be a whole number below 2\*\*31$"),
    ({"optimizer.learning_rate": 10**400}, r"^optimizer\.learning_rate: found 1000+…; must be a number$"),
    ({"model.position": ["rope", 3]}, r"^model\.position: found \['rope', 3\]; must be one of none"),
    (SPANS | {"model.encoder_layers": 0}, r"^train\.objective: found 'span_corruption'; span_corruption needs an enc"),
    (SPANS | COPY, r"^data\.corpus: found 'task:copy'; must be"),
    (SPANS | {"train.mean_span": 0.5}, r"^train\.mean_span: found 0\.5; must be in 1\.\."),
    (PAIRS | {"data.path": None}, r"^data\.path: found None; data\.corpus=pairs needs a file"),
    (PAIRS | {"model.encoder_layers": 0}, r"^model\.encoder_layers: found 0; must be above 0 for pairs"),
    (PAIRS | {"data.pair": ("a", "b")}, r"^data\.pair: found \('a', 'b'\); must be None: data\.corpus=pairs does"),
    ({"data.target_path": "b"}, r"^data\.target_path: found 'b'; must be None: data\.corpus=python_stdlib does not"),
    ({"data.path": "b/*.txt"}, r"^data\.path: .* None: .*=python_stdlib does not read it; data\.corpus=text does$"),
    (COPY | {"data.path": "b"}, r"^data\.path: found 'b'; must be None: data\.corpus=task:copy does not read it"),
    ({"data.corpus": "english", "data.path": "b"}, r"^data\.path: found 'b'; must be None: data\.corpus=english does"),
    (ENCODER, r"^data\.corpus: found 'python_stdlib'; must be pairs, task:NAME, or"),
    (ENCODER | COPY | {"data.isolate_documents": True}, r"^data\.isolate_documents: found True; must be False with"),
    (ENCODER | COPY | {"train.random_offsets": 999}, r"^train\.random_offsets: found 999; must be None with model\.e"),
    (
        ENCODER | COPY | {"model.position": "learned", "model.max_positions": 300, "source_length": 400},
        r"^source_length: found 400; learned positions end at",
    ),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=lambda value: str(value)[:50])
def test_bad_values_are_refused_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        loading.load("configs/default.py", overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "config.seed = 10**5000",
            r"^seed: found a value of type int that is too long to show; must be a whole number",
        ),
        ("config.model.num_layer = 3", r"^model\.num_layer: no such config field; did you mean model\.num_layers"),
        ("config.model.num_layers = 'three'", r"^model\.num_layers: found 'three'; must be a whole number"),
        ("config.model.heads: = 3", r"my\.py: SyntaxError"),
        ("return 1 / 0", r"my\.py: ZeroDivisionError: division by zero"),
        ("return None", r"my\.py: get_config\(\): found None; must return a config"),
        ("return 3", r"my\.py: get_config\(\): found 3; must return a config, as default\.py does"),
    ],
)
def test_mistakes_in_a_config_file_are_refused_in_one_line(tmp_path, line, message):
    file = tmp_path / "my.py"
    file.write_text(
        f"from configs import default\n\ndef get_config():\n    config = default.get_config()\n    {line}\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=message) as raised:
        loading.load(str(file))
    assert "\n" not in str(raised.value)


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--config: /no/a:b/config\.json not found; name a file"):
        loading.load("/no/a:b/config.json")
    with pytest.raises(UserError, match=r"nothing\.py not found"):
        loading.load("configs/nothing.py")
    with pytest.raises(UserError, match=r"config\.json: not found"):
        loading.read(tmp_path / "config.json")
    not_a_config = "not a run's config .found '3'; must be an object"
    for text, message in {"{": "not a run's config", '{"seed": 3}': ".*missing", "3": not_a_config}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=rf"config\.json: {message}"):
            loading.read(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"found README\.md; must be a Python file"):
        loading.load("README.md")
    with pytest.raises(UserError, match="found preset 'gpt5'"):
        loading.load("configs/presets.py:gpt5")
    with pytest.raises(UserError, match=r"--config: found 'configs/tiny\.py:gpt5'; must end with \.py: it has no"):
        loading.load("configs/tiny.py:gpt5")
