"""Real processes of all commands print no traceback for wrong flags, lost streams and damaged files."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, SMALL, make_text

pytestmark = pytest.mark.slow
RUN, OTHER = "{root}/run", "{root}/bpe"
FIELDS = SMALL | {"train.steps": 4, "model.num_layers": 2, "data.path": "{root}/texts/*.txt"}
CONFIG = " ".join(["--config=configs/default.py", *(f"'--config.{name}={value}'" for name, value in FIELDS.items())])
COMMANDS = {
    "train": f"train.py {CONFIG} --workdir={{root}}/new",
    "eval": f"eval.py --workdir={RUN}",
    "suites": f"eval.py --workdir={RUN} --suite=extrapolation,heads,pruning,figures,explorer,diagnose --lengths=1x",
    "tasks": f"eval.py --workdir={RUN} --suite=tasks",
    "sample": f"sample.py --workdir={RUN} --prompt=größer",
    "samples": f"sample.py --workdir={RUN} --prompt=the --samples=2 --json",
    "interactive": f"sample.py --workdir={RUN} --interactive --length=3",
    "bench": f"-m mini_gpt.bench {CONFIG} --steps=1",
    "decode": "-m mini_gpt.bench --decode configs/tiny.py --tokens=2",
    "export": f"-m mini_gpt.hugging_face export --workdir={OTHER} --output={{root}}/exported",
    "import": "-m mini_gpt.hugging_face import --input={root}/given --workdir={root}/imported",
    "count_parameters": "-m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt2_small",
    "figures": "-m mini_gpt.commands.figures --only=rope --out={root}/figures",
    "lab": "-m mini_gpt.lab --out={root}/lab.html",
    "config": "-m mini_gpt.config",
}
COMMANDS["sweep"] = f"-m mini_gpt.sweep {CONFIG} --vary=model.position=rope,alibi --workdir={{root}}/sweep"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a directory with a run, a run with BPE, and an exported model."""
    root = tmp_path_factory.mktemp("made")
    (root / "texts").mkdir()
    for number in range(150):
        (root / "texts" / f"{number}.txt").write_text(make_text(number, 20 + number % 50), encoding="utf-8")
    learned = "--config.model.position=learned --config.data.tokenizer=bpe --config.data.vocab_size=300"
    for command in (
        f"train.py {CONFIG} --workdir={RUN}",
        f"train.py {CONFIG} {learned} --workdir={OTHER}",
        f"-m mini_gpt.hugging_face export --workdir={OTHER} --output={{root}}/given",
    ):
        status, said = start(root, command)
        assert status == 0, said
    return root


@pytest.fixture
def root(made, tmp_path):
    """Return a copy of the runs. The texts are those of `made`, whose path was typed."""
    for name in ("run", "bpe", "given"):
        shutil.copytree(made / name, tmp_path / name)
    (tmp_path / "texts").symlink_to(made / "texts")
    (tmp_path / "cache").symlink_to(made / "cache")
    return tmp_path


def start(root, command, *, around="{}", more=()):
    """Run a command in a shell. Return its exit status, and what it wrote to stderr. around: such as "{} >&-"."""
    python = f"{shlex.quote(sys.executable)} {command.format(root=root)}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment |= {"MINI_GPT_CACHE": str(root / "cache"), "PYTHONDONTWRITEBYTECODE": "1"} | dict(more)
    line = "set -o pipefail; " + around.format(python, root=root)
    done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, capture_output=True, env=environment, timeout=300)
    return done.returncode, done.stderr.decode(errors="replace")


def assert_plain(status, said, expected=(0, 1)):
    """Check the exit status, and that there is no traceback; status 1 is explained in the last line."""
    assert status in expected, (status, said)
    assert "Traceback" not in said and "Exception ignored" not in said and "most recent call" not in said, said


@pytest.mark.parametrize("name", COMMANDS)
def test_an_ascii_locale_changes_nothing(root, name):
    status, said = start(root, COMMANDS[name], around="{} </dev/null >/dev/null", more=ASCII.items())
    assert_plain(status, said, expected=[1 if name == "tasks" else 0])
    written = {
        "train": "new/config.json",
        "eval": "run/eval/perplexity.json",
        "suites": "run/eval/diagnose.json",
        "sweep": "sweep/perplexity.md",
        "export": "exported/README.md",
        "import": "imported/config.json",
        "figures": "figures/rope.png",
        "lab": "lab.html",
    }
    assert (root / written.get(name, "run")).exists(), said


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("tasks", "interactive", "import", "train")])
def test_a_reader_that_ends_early_ends_in_silence(root, name):
    """All output stays below a pipe's 64 KB, so commands may also succeed."""
    status, said = start(root, COMMANDS[name], around="{} | true")
    assert_plain(status, said)
    assert "error" not in said.lower(), said


@pytest.mark.parametrize("name", ["eval", "sample", "count_parameters", "config"])
def test_a_full_standard_output_is_one_line(root, name):
    status, said = start(root, COMMANDS[name], around="{} > /dev/full")
    assert_plain(status, said, expected=[1])
    assert said.splitlines()[-1].startswith("error: ") and "No space left on device" in said
    assert name != "eval" or (root / "run" / "eval" / "perplexity.json").exists()


NO_TEXT = "found text that is not UTF-8; give UTF-8"
NO_PATH = "found an unprintable character in the path"
TYPED = {
    "an unknown scheme": (f"train.py {CONFIG} --workdir=no://bucket/run", "Protocol not known: no; use s3://"),
    "a URL without a run": (f"eval.py --workdir=file://{RUN}/eval", "/eval holds no run; give the address of one"),
    "a URL with a run": (f"-m mini_gpt.hugging_face export --workdir={RUN} --output=file://{RUN}", "holds files"),
    "a URL of one file": (f"sample.py --workdir={RUN} --prompt_file=s3://bucket/text", "s3://bucket/text: found a URL"),
    "bytes as a path": (f"sample.py --workdir={RUN}$'\\xff' --prompt=a", NO_PATH),
    "bytes as a new path": (f"train.py {CONFIG} --workdir={RUN}$'\\xff'", NO_PATH),
    "bytes as a prompt": (f"sample.py --workdir={RUN} --prompt=$'\\xff'", NO_TEXT),
    "bytes as a BPE prompt": (f"sample.py --workdir={OTHER} --prompt=a$'\\xff'", NO_TEXT),
    "bytes as a stop": (f"sample.py --workdir={OTHER} --prompt=a --stop=$'\\xff'", NO_TEXT),
    "bytes as a text": (f"eval.py --workdir={OTHER} --suite=figures --text=$'\\xff'", NO_TEXT),
    "a long prompt": (f"sample.py --workdir={RUN} --prompt_file={{root}}/long", "--prompt: found 3000000; must"),
    "a long BPE prompt": (f"sample.py --workdir={OTHER} --prompt_file={{root}}/long", "--prompt: found"),
}


@pytest.mark.parametrize("name", TYPED)
def test_unusable_values_end_in_one_line(root, name):
    command, message = TYPED[name]
    (root / "long").write_bytes(b"abc " * 750_000)
    before = sorted(root.rglob("*"))
    status, said = start(root, command)
    assert_plain(status, said, expected=[1])
    (last,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message.format(root=root) in last and len(last) < 500
    assert sorted(root.rglob("*")) == before


def test_a_path_beyond_ascii_needs_a_locale_that_has_it(root):
    for command in (f"train.py {CONFIG} --workdir={{root}}/größer", f"eval.py --workdir={RUN}é"):
        status, said = start(root, command, more=ASCII.items())
        assert_plain(status, said, expected=[1])
        assert "found a path that this locale can't represent; set PYTHONUTF8=1" in said.splitlines()[-1]


def test_interactive_mode_goes_on_after_unusable_lines(root):
    (root / "lines").write_bytes(b"\xff\n" + b"abc " * 750_000 + b"\nthe\n")
    for run in (RUN, OTHER):
        command = f"sample.py --workdir={run} --interactive --length=3"
        status, said = start(root, command, around="{} < {root}/lines > {root}/written")
        assert_plain(status, said, expected=[0])
        assert "found text that is not UTF-8" in said and "--prompt: found" in said
        assert (root / "written").read_text(errors="replace").startswith("the")


DAMAGED = {
    "list": "[]",
    "null": "null",
    "text": '"text"',
    "part": '{"checkpoint_step": 4}',
    "split": '{"checkpoint_step": 4, "overrides": {}, "split": [1], "tokens_scored": 1, "context_length": 32}',
    "types": '{"checkpoint_step": 4, "overrides": {}, "split": "validation", "context_length": [], "nll": "x"}',
    "nesting": '{"a":' * 50_000,
    "number": json.dumps({"checkpoint_step": 4, "nll": 10**400, "bits_per_byte": 1, "context_length": 32}),
    "bytes": "\udcff",
}


@pytest.mark.parametrize("name", ["split", "nesting", "types"])
def test_an_export_ignores_a_damaged_result(root, name):
    (root / "bpe" / "eval").mkdir(exist_ok=True)
    for suite in ("perplexity", "heads"):
        (root / "bpe" / "eval" / f"{suite}.json").write_text(DAMAGED[name])
    status, said = start(root, COMMANDS["export"])
    assert_plain(status, said, expected=[0])
    assert "nats per token" not in (root / "exported" / "README.md").read_text()
    status, said = start(root, f"eval.py --workdir={OTHER} --suite=explorer")
    assert_plain(status, said, expected=[0])
