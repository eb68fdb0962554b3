"""Studies in a bucket: machines that share nothing else, one that dies, the ledger, and errors in one line."""

import json
import signal
import time
from urllib.parse import unquote

import psutil
import pytest

from mini_gpt.commands import study_copy
from mini_gpt.commands.staging import Staged
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import ledger
from tests.conftest import SMALL
from tests.places.s3_server import CLOSE
from tests.places.test_runs_in_buckets import finish, start
from tests.study.conftest import sweep

LONG = {"train.steps": 1000, "train.log_every": 10, "eval.every": 500, "checkpoint.every": 20}
TABLES = ("perplexity.csv", "perplexity.md", "runs.csv", "comparisons.csv")


@pytest.mark.slow
def test_machines_that_share_only_a_bucket_make_the_tables_of_one_machine(server, monkeypatch, corpus_files, tmp_path):
    """The second machine dies in its second run. Another one resumes this run, and repeats no other."""
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    place = Place("s3://bucket/studies/positions")

    def begin(machine, action, workdir, *more):
        line = ["-m", "mini_gpt.study", action, "--config=configs/default.py", "--vary=model.position=rope,alibi"]
        line += ["--seeds=2", "--contrast=rope<alibi", f"--workdir={workdir}", "--jobs=1", *more]
        return start(server, tmp_path / machine, *line, fields=SMALL | LONG | {"data.path": corpus_files})

    def steps(run):
        return list(Staged(Place(f"{place}/{run}"), "read", str(tmp_path)).read_markers())

    def kill(method, path):
        """Kill the second machine while it copies a checkpoint of its second run, but not the first one."""
        if method == "PUT" and "/alibi" in path and "seed=1/checkpoints/" in unquote(path) and steps("alibi,seed=1"):
            for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
                process.kill()
            return CLOSE
        return None

    first, second = (begin(f"machine {shard}", "run", place, f"--shard={shard}/2") for shard in (0, 1))
    server.fault = kill
    finish(second, -signal.SIGKILL)
    server.fault = lambda method, path: None
    finish(first)
    at, done = max(steps("alibi,seed=1")), len(server.log)
    assert 0 < at < LONG["train.steps"] and max(steps("alibi,seed=0")) == 1000
    finish(begin("machine 2", "run", place, "--shard=1/2"))
    (log,) = (tmp_path / "machine 2").rglob("*.log")
    assert log.name == "alibi,seed=1.log" and f"is at step {at}: resuming" in log.read_text()
    assert [path for method, path in server.log[done:] if method == "PUT" and "seed=0" in unquote(path)] == []
    said = finish(begin("machine 3", "report", place))
    assert "4 of 4 runs are complete, 0 failed" in said
    finish(begin("machine 4", "run", tmp_path / "local"))
    for name in TABLES:
        assert place.read(name) == (tmp_path / "local" / name).read_bytes(), name
    assert place.read("report.html").startswith(b"<!")
    assert place.read("report.md").count(b"--shard=") == 3
