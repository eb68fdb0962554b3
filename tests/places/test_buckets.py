"""Files in places with a scheme: faults of the server, errors in one line, and copies in the cache."""

import collections
import itertools
import os
import types

import pytest
from pyarrow import fs

from mini_gpt.commands import command_line
from mini_gpt.runtime import buckets, copies, files
from mini_gpt.runtime.buckets import BucketError, Place
from mini_gpt.runtime.errors import UserError
from tests.places.s3_server import CLOSE, LOSE

LARGE = os.urandom(2**24 + 1)  # several blocks, and several parts of an upload


def count_faults(server, fault, times, part=""):
    """Answer the first `times` requests of each method and path with `part` by a fault. Return the counts."""
    counts = collections.Counter()

    def answer(method, path):
        key = method, path.partition("?")[0]
        counts[key] += part in path
        return fault if 0 < counts[key] <= times else None

    server.fault = answer
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "times", "part"), [(503, 3, "small"), (CLOSE, 1, ""), (LOSE, 1, "")])
def test_files_survive_faults_of_the_server(server, tmp_path, fault, times, part):
    place = Place(f"s3://bucket/faults-{fault}")
    (tmp_path / "large").write_bytes(LARGE)
    counts = count_faults(server, fault, times, part)
    place.write("small", b"abc")
    assert place.upload(tmp_path / "large", "a/large") == len(LARGE)
    assert {name: entry.size for name, entry in place.files().items()} == {"a/large": len(LARGE), "small": 3}
    place.download("a/large", tmp_path / "copy", len(LARGE))
    assert (tmp_path / "copy").read_bytes() == LARGE and place.read("small") == b"abc"
    place.delete("a", folder=True)
    place.delete("small")
    assert place.files() == {} and max(counts.values()) > times


@pytest.mark.slow
def test_a_lasting_fault_is_one_line_and_a_cut_off_download_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_gpt.runtime.buckets.ATTEMPTS", 1)
    place = Place("s3://bucket/lasting")
    place.write("file", b"abc")
    with pytest.raises(BucketError, match=r"cut off after 3 of 5 bytes"):
        place.download("file", tmp_path / "copy", 5)
    with pytest.raises(FileNotFoundError):
        place.read("missing")
    for fault, said in (
        (403, r"access denied \(403\); check AWS_ACCESS_KEY_ID"),
        (503, "can't be reached .*SLOW_DOWN"),
    ):
        server.fault = lambda method, path, fault=fault: fault
        with pytest.raises(BucketError, match=f"^s3://bucket/lasting: {said}[^\n]*$"):
            place.write("file", b"abc")
    server.fault = lambda method, path: None
    with pytest.raises(BucketError, match=r"^s3://missing/run: no such bucket \(404\); make it"):
        Place("s3://missing/run").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BucketError, match=r"^s3://bucket/run: can't be reached .*AWS_ENDPOINT_URL"):
        Place("s3://bucket/run").check()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError("for key 'r/404/403' in bucket 'b': AWS Error NETWORK_CONNECTION during HeadObject: "),
            "can't be reach",
        ),
        (
            OSError("for key 'forbidden' in bucket 'b': AWS Error UNKNOWN (HTTP status 503) during Put"),
            "can't be reached",
        ),
        (
            OSError("for key 'a' in bucket 'b': AWS Error UNKNOWN (HTTP status 403) during Put"),
            r"access denied \(403\)",
        ),
        (
            OSError("for key 'r/404' in bucket 'b': AWS Error ACCESS_DENIED during HeadObject: "),
            r"access denied \(403\)",
        ),
        (
            OSError("for key 'r/403' in bucket 'b': AWS Error NO_SUCH_BUCKET during PutObject: "),
            r"no such bucket \(404\)",
        ),
        (PermissionError(13, "Permission denied", "/404"), r"access denied \(403\)"),
        (ValueError("PERMISSION_DENIED: Error reading step 404"), r"access denied \(403\)"),
        (ValueError("UNAVAILABLE: Error reading 'access denied'"), "can't be reached"),
    ],
)
def test_an_error_is_told_by_its_code_and_not_by_the_name_of_a_file(error, said):
    with pytest.raises(BucketError, match=f"^s3://b/r: {said}"), buckets.clear_errors("s3://b/r"):
        raise error


def test_bad_addresses_are_refused_and_a_password_is_not_shown():
    with pytest.raises(BucketError, match=r"nowhere://a/b: Protocol not known"):
        Place("nowhere://a/b").files()
    for password in ("PASSWORD", "PASS/WORD"):
        for scheme, make in itertools.product(("s3", "S3", "https"), (Place, command_line.path, files.expanded)):
            with pytest.raises(UserError) as refused:
                make(f"{scheme}://key:{password}@host/bucket")
            assert not any(part in str(refused.value) for part in ("key", "PASS", "WORD"))
    Place("file:///home/me@host/run")


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_glob_is_copied_and_only_changed_files_are_copied_again(tmp_path, scheme, monkeypatch):
    place = Place(f"{scheme}://{tmp_path}/texts")
    for name in ("a.txt", "b/c.txt", "b/d.gz"):
        place.write(name, name.encode())
    copied = []
    download = Place.download
    monkeypatch.setattr(Place, "download", lambda self, name, *rest: copied.append(name) or download(self, name, *rest))
    fetch = lambda rest: copies.fetch(f"{place.address}/{rest}", tmp_path / "cache")
    found = fetch("**/*.txt")
    content = lambda: {path.relative_to(found.parents[1]).as_posix() for path in found.parents[1].rglob("*.txt")}
    assert found.name == "*.txt" and content() == set(copied) == {"a.txt", "b/c.txt"}
    fetch("**/*.txt")
    assert copied == ["a.txt", "b/c.txt"]
    place.write("a.txt", b"other text")
    place.delete("b/c.txt")
    fetch("**/*.txt")
    assert copied[2:] == ["a.txt"] and content() == {"a.txt"}
    assert (found.parents[1] / "a.txt").read_bytes() == b"other text"
    assert fetch("b/d.gz").read_bytes() == b"b/d.gz"
    assert [path.name for path in fetch("b").iterdir()] == ["d.gz"]
    with pytest.raises(UserError, match="matches no file"):
        fetch("*.csv")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def place(request, tmp_path, fast):
    if request.param == "s3":
        request.getfixturevalue("server")
        return Place(f"s3://bucket/{tmp_path.name}")
    return Place(f"file://{tmp_path}")


def test_names_of_objects_that_leave_the_folder_are_left_out(tmp_path, monkeypatch):
    place = Place("memory://names")
    names = ["a/b", "/home/me/.bashrc", "../c", "a/../d", "a//e", "./f"]
    infos = [fs.FileInfo(f"names/{name}", fs.FileType.File, size=1) for name in names]
    monkeypatch.setattr(place, "_system", types.SimpleNamespace(get_file_info=lambda _: infos))
    monkeypatch.setattr(place, "path", "names")
    assert list(place.files()) == ["a/b"]


@pytest.mark.slow
def test_an_operation_is_tried_a_fixed_number_of_times(server):
    counts = count_faults(server, 503, 99)
    with pytest.raises(BucketError, match="can't be reached"):
        Place("s3://bucket/tries").write("file", b"abc")
    assert counts["PUT", "/bucket/tries/file"] == buckets.ATTEMPTS
