"""Settings of generation, end tokens and chat templates of an imported model are used, and exported as they were."""

import json
from types import SimpleNamespace

import pytest
import tokenizers as library

from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.data.model_source import ModelSource
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.hugging_face import model_card, origin, source_files, tokenizer_files
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory
from tests.hugging_face.bpe_tokenizers import BPE
from tests.hugging_face.test_imported_tokenizers import characters

NAMES = ("<|begin|>", "<|end|>", "<|eom|>", "<|eot|>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>\r\n{% endfor %}ä"
NAMED = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]


def directory(path, template_in="jinja", generation=None, template=TEMPLATE):
    """Write the tokenizer of a model with three end tokens, as Llama 3 has them; return (ids by name, rows)."""
    path.mkdir(exist_ok=True)
    model = library.Tokenizer.from_str(BPE.model.to_str())
    model.add_special_tokens([*NAMES])
    model.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    if template_in == "jinja":
        (path / "chat_template.jinja").write_bytes(template.encode())
        named["chat_template"] = "an older one"
    elif template_in:
        named["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return {name: model.token_to_id(name) for name in NAMES}, model.get_vocab_size()


@pytest.mark.parametrize(
    "template_in, template", [("jinja", TEMPLATE), ("json", TEMPLATE), ("json", NAMED), (None, "")]
)
def test_an_export_writes_what_an_import_has_read(template_in, template, tmp_path):
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "other": {"a": [None, "ä"]}}
    ids, rows = directory(tmp_path / "in", template_in, template=template)
    begin, end, eom, eot = ids.values()
    generation |= {"bos_token_id": begin, "eos_token_id": [end, eot]}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(generation))
    config = {"bos_token_id": begin, "eos_token_id": [end, eom], "pad_token_id": None, "hidden_size": 3}
    read = tokenizer_files.read(tmp_path / "in", rows + 3, [end, eom], config=config)
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.to_dict() == read.to_dict() and loaded.source == read.source
    assert loaded.other_ends == (eom, eot) and tokenizers.separator(loaded) == end
    assert loaded.source.template == (TEMPLATE if template_in else None)
    (tmp_path / "out").mkdir()
    written = tokenizer_files.write(loaded, tmp_path / "out", 32)
    assert written == {"bos_token_id": begin, "eos_token_id": [end, eom], "pad_token_id": end}
    source_files.write(loaded.source, tmp_path / "out", written)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation
    named = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (named["bos_token"], named["eos_token"]) == ("<|begin|>", "<|eot|>")
    assert named.get("chat_template") == (NAMED if template == NAMED else None)
    jinja = tmp_path / "out" / "chat_template.jinja"
    assert (jinja.read_bytes() == TEMPLATE.encode()) if isinstance(template, str) and template else not jinja.exists()
    again = tokenizer_files.read(tmp_path / "out", rows + 3, [end, eom], config=config)
    assert again.source == read.source and again.other_ends == read.other_ends


def test_a_run_of_its_own_writes_the_ids_of_its_tokenizer(tmp_path):
    for tokenizer in (ByteTokenizer(), BPE, tokenizers.CharacterTokenizer("abc")):
        ids = tokenizer_files.write(tokenizer, tmp_path, 32)
        source_files.write(tokenizer.source, tmp_path, ids)
        end = tokenizers.separator(tokenizer)
        wanted = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
        assert json.loads((tmp_path / "generation_config.json").read_text()) == wanted
        again = tokenizer_files.read(tmp_path, end + 1, end, config=wanted)
        assert type(again) is type(tokenizer) and again.other_ends == ()
        assert "source" not in tokenizer.to_dict()


def test_a_byte_tokenizer_with_a_chat_template_keeps_it(tmp_path):
    ids = tokenizer_files.write(ByteTokenizer(), tmp_path, 32)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    read = tokenizer_files.read(tmp_path, 257, 256, config=ids)
    assert isinstance(read, BpeTokenizer) and read.source.template == TEMPLATE
    assert read.encode("größer").tolist() == list("größer".encode())
    (tmp_path / "tokenizer.json").write_text(characters("a", "b", "#"))
    with pytest.raises(UserError, match="can't be kept for a tokenizer of characters; remove it"):
        tokenizer_files.read(tmp_path, 3, 2)


GEN, JINJA = "generation_config.json", "chat_template.jinja"
RIGHT = "must be a whole number or a list of them"


@pytest.mark.parametrize(
    "name, content, message",
    [
        (GEN, "{", r"generation_config.json: not valid JSON"),
        (GEN, "[" * 10**4, r"generation_config.json: not valid JSON"),
        (GEN, "[]", r"config.json: found \[\]; must be a JSON object"),
        (GEN, '{"eos_token_id": "x"}', rf"config.json: eos_token_id: found 'x'; {RIGHT}"),
        (GEN, '{"eos_token_id": [1, true]}', rf"config.json: eos_token_id: found \[1, True\]; {RIGHT}"),
        (JINJA, b"\xff", r"chat_template.jinja: not UTF-8: invalid start byte at byte 0"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: found 3; must be a text, or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template: found .*; must be a text, or"),
    ],
)  # fmt: skip
def test_files_that_are_not_valid_are_refused(name, content, message, tmp_path):
    ids, rows = directory(tmp_path, None)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        tokenizer_files.read(tmp_path, rows, ids["<|end|>"])


def test_end_tokens_that_the_model_lacks_are_kept_but_not_used(tmp_path):
    ids, rows = directory(tmp_path, None, {"eos_token_id": [10**6, -1]})
    read = tokenizer_files.read(tmp_path, rows, ids["<|end|>"], config={"eos_token_id": ids["<|end|>"]})
    assert read.other_ends == () and read.source.generation["eos_token_id"] == [10**6, -1]


@pytest.mark.parametrize(
    "card, license",
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\nlicense: mit", {"license": "apache-2.0"}),
        ("---\r\nlicense: 'mit' \r\n---", {"license": "mit"}),
        (
            '---\nlicense: other\nlicense_name: "llama3.2"\nlicense_link: https://example.org/a\n---',
            {"license": "other", "license_name": "llama3.2", "license_link": "https://example.org/a"},
        ),
        ("license: mit", {}),
        ("# A\n---\nlicense: mit\n---", {}),
        ("---\nlicense: [mit]\nlicense_name: a`b\nlicense_link: |\n  x\n---", {}),
        ("---\n  license: mit\n---", {}),
        ("---\nlicense: mit" + "\nx: y" * 2**20, {"license": "mit"}),
        ("", {}),
    ],
)
def test_the_license_is_that_of_the_source_s_card(card, license, tmp_path):
    ids, rows = directory(tmp_path)
    (tmp_path / "README.md").write_text(card)
    read = tokenizer_files.read(tmp_path, rows, ids["<|end|>"])
    assert read.source.license == license
    tokenizers.save(read, tmp_path / "saved")
    assert tokenizers.load(tmp_path / "saved").source.license == license


def card_of(tokenizer, workdir):
    """Return the text of a model card that depends on the tokenizer and the directory of a run."""
    config = loading.load("configs/tiny.py", {"data.tokenizer": "bytes"})
    run = SimpleNamespace(tokenizer=tokenizer, workdir=workdir, config=config, step=3)
    return f"{model_card._metadata(run)}\n{model_card._about_license(run)}"


def test_a_card_names_the_license_and_the_base_model(tmp_path):
    ids, rows = directory(tmp_path / "in")
    read = lambda: tokenizer_files.read(tmp_path / "in", rows, ids["<|end|>"])
    assert card_of(ByteTokenizer(), tmp_path).startswith('license: "unknown"\nLicense: not stated. Before you publish')
    assert "\nLicense: not found in the files of the source. Check its terms" in card_of(read(), tmp_path)
    (tmp_path / "in" / "README.md").write_text("---\nlicense: other\nlicense_name: a-b\n---")
    first, tuned, again = (tmp_path / name for name in ("first", "tuned", "again"))
    for workdir in (first, tuned, again):
        workdir.mkdir()
    copy = tmp_path / "models--Some-One--a.Model_1--b" / "snapshots" / "0123"
    origin.record_import(first, copy, {"architecture": "Llama"})
    files.write_json(tuned / run_directory.INIT_FROM, {"workdir": str(first), "checkpoint_step": 0})
    files.write_json(again / run_directory.INIT_FROM, {"workdir": str(tuned), "checkpoint_step": 3})
    for workdir in (first, tuned, again):
        yaml, about = card_of(read(), workdir).rsplit("\n", 1)
        assert yaml == 'license: "other"\nlicense_name: "a-b"\nbase_model: "Some-One/a.Model_1--b"'
        assert about.startswith("License: other, as the card of the source states. Check its terms before you use or")
    origin.record_import(
        first, tmp_path / "models" / "a", {"architecture": "Llama", "model": "A/b", "commit": "0" * 40}
    )
    assert 'base_model: "A/b"' in card_of(read(), tuned)
    origin.record_import(first, tmp_path / "models" / "a", {"architecture": "Llama"})
    files.write_json(tuned / run_directory.INIT_FROM, {"workdir": str(tuned), "checkpoint_step": 0})  # a loop
    (again / run_directory.INIT_FROM).write_text("{")
    for workdir in (first, tuned, again):
        assert "base_model" not in card_of(read(), workdir)


@pytest.mark.parametrize(
    "source", [3, {"ids": 3}, {"ids": {"x": 3}}, {"generation": []}, {"chat_template": 3}, {"other": 1}, []]
)
def test_a_damaged_source_in_a_runs_tokenizer_is_refused(source, tmp_path):
    ids, rows = directory(tmp_path / "in")
    read = tokenizer_files.read(tmp_path / "in", rows, ids["<|end|>"])
    assert read.source == ModelSource({}, None, TEMPLATE)
    (tmp_path / tokenizers.FILE).write_text(json.dumps(read.to_dict() | {"source": source}))
    with pytest.raises(UserError, match=r"tokenizer.json: "):
        tokenizers.load(tmp_path)
