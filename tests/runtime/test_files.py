"""Files and directories are written whole, also by several processes at once and if a write fails."""

import errno
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from mini_gpt.insight import curves
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError


def figure(title):
    drawn, _ = plt.subplots()
    drawn.suptitle(title)
    return drawn


def test_the_cache_of_an_unknown_user_without_home_is_refused(monkeypatch):
    """Containers often start processes with a user id that has no name."""
    assert files.cache_directory() == Path(os.environ["MINI_GPT_CACHE"])
    monkeypatch.delenv("MINI_GPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/data")
    assert files.cache_directory() == Path("/data/mini_gpt")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(UserError, match=r"^~/\.cache/mini_gpt: found no home directory for ~; set HOME, or give"):
        files.cache_directory()


WRITERS = {
    "text": lambda path, number: files.write_text(path, str(number) * 100_000),
    "json": lambda path, number: files.write_json(path, {"numbers": [number] * 10_000}),
    "png": lambda path, number: curves.save(figure(str(number)), path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_two_writers_of_a_file_leave_one_whole_content(tmp_path, monkeypatch, kind):
    write, whole = WRITERS[kind], set()
    for number in (1, 2):
        write(tmp_path / "alone.png", number)
        whole.add((tmp_path / "alone.png").read_bytes())
    sync, half = os.fsync, threading.Barrier(2)

    def wait_for_the_other(handle):
        sync(handle)
        half.wait()

    monkeypatch.setattr(os, "fsync", wait_for_the_other)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(functools.partial(write, tmp_path / "file.png"), (1, 2))) == [None, None]
    assert (tmp_path / "file.png").read_bytes() in whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.png", "file.png"]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_failed_write_leaves_the_old_content_and_no_draft(tmp_path, monkeypatch, kind):
    path = tmp_path / "file.png"
    path.write_text("old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=rf"^{path}: can't be written \(No space left on device\)"):
        WRITERS[kind](path, 1)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


def test_text_that_is_no_unicode_leaves_no_draft(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        files.write_text(tmp_path / "file", "\udcff")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["a file", "an empty link", "a directory"])
def test_what_another_process_wrote_meanwhile_is_kept(tmp_path, there):
    target = tmp_path / "target"
    with pytest.raises(UserError, match="exists already"), files.directory_written_whole(target) as draft:
        (draft / "file").touch()
        if there == "a directory":
            target.mkdir()
            (target / "theirs").touch()
        elif there == "a file":
            target.touch()
        else:
            target.symlink_to("nowhere")
    assert [path.name for path in tmp_path.rglob("*")] == ["target"] + ["theirs"] * (there == "a directory")
