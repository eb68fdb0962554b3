"""count_parameters counts the parameters that training would make, for any vocabulary."""

import re

import jax
import pytest

from mini_gpt.data import corpora, token_store
from mini_gpt.training import run_directory
from mini_gpt.training.assembly import assemble, make_mesh
from tests.commands.test_command_line import type_in


@pytest.fixture
def counted(monkeypatch, capsys):
    """Return a function from flags to the number of parameters, or the error line."""

    def count(*flags):
        error = type_in(monkeypatch, "mini_gpt.commands.count_parameters", *flags)
        total = re.search(r"total +([\d,]+)", capsys.readouterr().out)
        return error or int(total[1].replace(",", ""))

    return count


def claim(config, directory):
    """Write the files of a new run; return the number of parameters in its training state."""
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    run_directory.claim(directory, config, corpus, tokenizer)
    state = assemble(config, make_mesh(config), corpus, tokenizer).abstract_state
    return sum(leaf.size for leaf in jax.tree.leaves(state.parameters))


TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "context_length": 64}
MASKED = {"train__objective": "masked", "model__causal": False}


@pytest.mark.parametrize(
    "fields, config_is_enough",
    [
        ({}, True),
        (MASKED | {"model__prediction_head": True, "model__embedding_norm": True}, True),
        (TASK | MASKED | {"data__isolate_documents": True, "model__tie_embeddings": False}, True),
        ({"data__tokenizer": "bpe", "data__vocab_size": 270}, True),
        ({"data__tokenizer": "characters"}, False),
    ],
    ids=str,
)
def test_the_count_is_that_of_the_training_state(counted, small, tmp_path, fields, config_is_enough):
    trained = claim(small(**fields), tmp_path / "run")
    assert counted(f"--workdir={tmp_path / 'run'}") == trained
    if config_is_enough:
        assert counted(f"--config={tmp_path / 'run' / 'config.json'}") == trained


def test_a_given_vocabulary_is_counted(counted):
    few, more = (counted("--config=configs/shakespeare_char.py", f"--vocab_size={size}") for size in (1, 101))
    assert more - few == 100 * 384


def test_sizes_out_of_range_or_unknown_are_refused(counted):
    assert counted("--config=configs/tiny.py", "--vocab_size=0").startswith("error: --vocab_size: found 0")
    line = counted("--config=configs/shakespeare_char.py")
    assert line.startswith("error: data.tokenizer: found 'characters'") and "--vocab_size" in line


def test_a_config_without_its_path_is_counted(counted, tmp_path):
    text = "from configs import default\n\ndef get_config():\n    config = default.get_config()\n"
    (tmp_path / "mine.py").write_text(text + "    config.data.corpus = 'text'\n    return config\n")
    assert counted(f"--config={tmp_path}/mine.py") == counted("--config=configs/default.py")
