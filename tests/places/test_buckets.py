"""Files in places with an address: faults of the server, errors in one line, and copies in the cache."""

import collections
import itertools
import os

import pytest

from mini_gpt.commands import command_line
from mini_gpt.runtime import buckets, files
from mini_gpt.runtime.buckets import Place
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
@pytest.mark.parametrize(("fault", "times"), [(503, 3), (CLOSE, 1), (LOSE, 1)])
def test_files_survive_faults_of_the_server(server, tmp_path, fault, times):
    place = Place(f"s3://bucket/faults-{fault}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "large").write_bytes(LARGE)
    counts = count_faults(server, fault, times)
    place.write("small", b"abc")
    place.upload(tmp_path / "folder", "a")
    assert {name: entry.size for name, entry in place.files().items()} == {"a/large": len(LARGE), "small": 3}
    place.download("a/large", tmp_path / "copy")
    assert (tmp_path / "copy" / "a" / "large").read_bytes() == LARGE and place.read("small") == b"abc"
    place.delete("a")
    place.delete("small")
    assert place.files() == {} and max(counts.values()) > times


def test_bad_addresses_are_refused_and_a_password_is_not_shown():
    with pytest.raises(UserError, match=r"nowhere://a/b: Protocol not known"):
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
    fetch = lambda rest: buckets.copied(f"{place.address}/{rest}")
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


def test_a_name_of_an_object_that_leaves_the_folder_is_refused(tmp_path):
    place = Place(f"file://{tmp_path}/place")
    for name in ("../c", "/etc/x"):
        with pytest.raises(UserError, match="found a link to"):
            place.download(name, tmp_path / "copy")
