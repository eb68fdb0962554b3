"""The errors of make if Python is too old or lacks venv."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    "lacks, message",
    [
        ("import venv", f"has no venv: install it (Debian and Ubuntu: apt install {VERSION}-venv)"),
        ("(3, 11)", "is missing or older than 3.11: install Python 3.11 or newer, or name one with make PYTHON=..."),
    ],
)
def test_make_names_what_to_install(tmp_path, lacks, message):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{lacks}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "train", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stdout
    assert not (tmp_path / "venv").exists()
