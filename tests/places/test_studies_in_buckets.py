"""Studies in a bucket: machines that share nothing else, one that dies, and errors in one line."""

import signal
from urllib.parse import unquote

import psutil
import pytest

from mini_gpt.commands.staging import Staged
from mini_gpt.runtime.buckets import Place
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.places.s3_server import CLOSE
from tests.places.test_runs_in_buckets import finish, start

LONG = {"train.steps": 1000, "train.log_every": 100, "eval.every": 500, "checkpoint.every": 100}
TABLES = ("perplexity.csv", "perplexity.md", "runs.csv", "comparisons.csv")


@pytest.mark.slow
def test_machines_that_share_only_a_bucket_make_the_tables_of_one(server, monkeypatch, corpus_files, tmp_path):
    """The second machine dies. A third one resumes its run, and does not repeat that of the first."""
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    place = Place("s3://bucket/studies/positions")

    def begin(machine, action, workdir, *more):
        line = ["-m", "mini_gpt.study", action, "--config=configs/default.py", "--vary=model.position=rope,alibi"]
        line += ["--contrast=rope<alibi", f"--workdir={workdir}", "--jobs=1", *more]
        return start(server, tmp_path / machine, *line, fields=SMALL | LONG | {"data.path": corpus_files})

    def steps(run):
        return list(Staged(Place(f"{place}/{run}"), "read", str(tmp_path)).read_markers())

    def kill(method, path):
        """Kill the second machine while it copies a checkpoint, but not the first one."""
        if method == "PUT" and "/alibi,seed=0/checkpoints/" in unquote(path) and steps("alibi,seed=0"):
            for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
                process.kill()
            return CLOSE
        return None

    first, second = (begin(f"machine {shard}", "run", place, f"--shard={shard}/2") for shard in (0, 1))
    server.fault = kill
    finish(second, -signal.SIGKILL)
    server.fault = lambda method, path: None
    finish(first)
    at, done = max(steps("alibi,seed=0")), len(server.log)
    assert 0 < at < 1000 == max(steps("rope,seed=0"))
    finish(begin("machine 2", "run", place))
    (log,) = (tmp_path / "machine 2").rglob("*.log")
    assert log.name == "alibi,seed=0.log" and f"is at step {at}: resuming" in log.read_text()
    assert not any(method == "PUT" and "rope,seed=0" in unquote(path) for method, path in server.log[done:])
    for name in TABLES:
        place.delete(name)
    assert "2 of 2 runs are complete, 0 failed" in finish(begin("machine 3", "report", place))
    finish(begin("machine 4", "run", tmp_path / "local"))
    for name in TABLES:
        assert place.read(name) == (tmp_path / "local" / name).read_bytes(), name
    assert place.read("report.html").startswith(b"<!") and place.read("report.md").count(b"--shard=") == 2


@pytest.mark.slow
def test_a_bucket_that_is_missing_denied_or_not_reached_is_one_line(server, monkeypatch, corpus_files):
    monkeypatch.setattr("mini_gpt.runtime.buckets.ATTEMPTS", 1)
    place = Place("s3://bucket/studies/denied")
    fields = [f"--config.{name}={value}" for name, value in {**SMALL, "data.path": corpus_files}.items()]
    line = ["--config=configs/default.py", *fields, "--vary=model.d_ff=64"]

    def said(action, workdir):
        return type_in(monkeypatch, "mini_gpt.commands.study", action, *line, f"--workdir={workdir}")

    assert said("run", "s3://missing/study").startswith("error: s3://missing/study: no such bucket (404); make it")
    server.fault = lambda method, path: 403 if method == "PUT" else None
    assert said("run", place).startswith(f"error: {place}: access denied (403); check AWS_")
    assert place.files() == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert said("report", place).startswith(f"error: {place}: can't be reached (")
