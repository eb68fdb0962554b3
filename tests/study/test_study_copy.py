"""The copy of a study in a bucket: what is copied, the ledger, and another study."""

import json

import pytest

from mini_gpt.commands import study_copy
from mini_gpt.runtime import files
from mini_gpt.runtime.buckets import Place
from mini_gpt.study import ledger
from mini_gpt.study.definition import Plan, Study
from tests.commands.test_command_line import type_in


@pytest.fixture
def bucket(tmp_path):
    return Place(f"file://{tmp_path}/bucket/study")


def copy_on(machine, bucket, tmp_path):
    """Return the copy of the study on a machine."""
    found = study_copy.Copy(bucket, "study", str(tmp_path / machine))
    found.fetch()
    return found


def test_entries_of_machines_that_start_at_the_same_time_are_all_kept(bucket, overrides, tmp_path):
    plan = Plan("s", Study("", "configs/default.py", {"one": {}}, [0], {"perplexity": {}}, [], overrides))
    first, second = (copy_on(machine, bucket, tmp_path) for machine in ("a", "b"))
    for copy, number in ((first, 1), (second, 2)):
        ledger.append(copy.local, "run", plan, number)
        ledger.save(copy.local, plan)
        copy.send()
    for copy in (second, first):
        copy.send()  # nothing new
        copy.fetch()
        assert [entry["results"] for entry in ledger.entries(copy.local)] == [1, 2]
    assert (copy_on("c", bucket, tmp_path).local / ledger.STUDY).read_bytes() == bucket.read(ledger.STUDY)
    ledger.append(first.local, "run", plan, 3)
    first.send()
    assert [entry["results"] for entry in ledger.entries(copy_on("c", bucket, tmp_path).local)] == [1, 2, 3]


def test_the_copy_is_that_of_the_bucket_without_checkpoints(bucket, tmp_path):
    kept = {"run/config.json", "run/eval/perplexity.json", "run/tensorboard/x", "run/metrics.jsonl", "report.md"}
    for name in (*kept, "run/checkpoints/1-a/array", "run/complete/1.json", "run/lease", "other/eval/perplexity.json"):
        bucket.write(name, name.encode())
    copy = copy_on("a", bucket, tmp_path)
    assert copy.small_files().keys() == kept | {"other/eval/perplexity.json"}
    bucket.delete("other", folder=True)
    bucket.delete("run/tensorboard", folder=True)
    bucket.write("run/eval/perplexity.json", b"measured again")
    copy.fetch("run")
    assert copy.small_files().keys() == kept - {"run/tensorboard/x"} | {"other/eval/perplexity.json"}
    assert (copy.local / "run/eval/perplexity.json").read_bytes() == b"measured again"
    copy.fetch()
    assert copy.small_files().keys() == kept - {"run/tensorboard/x"}
    (copy.local / "report.md").write_text("a new report")
    copy.send()
    assert bucket.read("report.md") == b"a new report" and bucket.read("run/metrics.jsonl") == b"run/metrics.jsonl"


def test_another_study_in_the_bucket_is_refused_by_its_address(monkeypatch, flags, fake, bucket):
    bucket.write(ledger.STUDY, json.dumps(files.with_checksum({"name": "other"})).encode())
    for action in ("run", "report", "freeze", "plan"):
        more = [f"--workdir={bucket}", "--vary=model.d_ff=64"]
        said = type_in(monkeypatch, "mini_gpt.commands.study", action, *flags, *more)
        assert said.startswith(f"error: --workdir: {bucket} holds the study other; name a new directory for default,")
    assert fake == [] and bucket.files().keys() == {ledger.STUDY}
