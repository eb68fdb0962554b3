"""The errors of make if Python is too old or lacks venv, and what the checks of a submission install."""

import re
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


@pytest.mark.parametrize("target", ["train", "exercises"])
def test_make_says_what_it_installs_and_shows_the_progress_of_pip(tmp_path, target):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}/venv"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    (install,) = re.findall(r"^.*pip install .*$", said, re.MULTILINE)
    assert "Installing the packages of requirements" in said and "--quiet" not in install


@pytest.mark.parametrize("found", [[], ["chromium"], ["chromedriver"], ["chromium", "chromedriver"]])
def test_both_programs_of_the_browser_are_installed(tmp_path, found):
    script = (REPOSITORY / ".ci" / "run").read_text()
    begin = script.index("{ command -v chromium")
    install = script[begin : script.index("make test")]
    for name in [*found, "apt-get"]:
        (tmp_path / name).write_text('#!/bin/sh\n/bin/touch "$0.ran"\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(["/bin/bash", "-c", install], check=True, env={"PATH": str(tmp_path)})
    assert (tmp_path / "apt-get.ran").exists() == (len(found) < 2)


@pytest.mark.slow
def test_the_summary_counts_the_tests_that_are_left_out():
    """Collect a file with slow tests, alone and with the workers, as `make test` has them."""
    said = {}
    for flags in (["--collect-only", "-m", "slow"], ["-n", "1", "-m", "not slow"]):
        call = [sys.executable, "-m", "pytest", "-q", *flags, "tests/faults/test_kills.py"]
        said[flags[0]] = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
    (count,) = re.findall(r"^(\d+)/\d+ tests collected", said["--collect-only"], re.MULTILINE)
    assert f"\n{count} slow tests were left out; make test-slow runs them" in said["-n"], said


@pytest.mark.slow
def test_a_part_of_the_tests_says_which_files_it_left_out():
    call = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--minutes=0", "tests/config"]
    said = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
    listed = re.search(r"^(\d+) tests were not run, in the files (.*)$", said, re.MULTILINE)
    assert listed and listed[2] == "tests/config/test_bad_configs.py tests/config/test_loading.py", said
    assert f"{listed[1]} skipped in " in said


@pytest.mark.slow
def test_the_order_of_the_files_depends_on_the_date_only():
    def files(order):
        call = [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--order={order}", "tests/runtime"]
        said = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True).stdout
        return list(dict.fromkeys(re.findall(r"^(tests/\S+\.py)::", said, re.MULTILINE)))

    first, again, other = files("2026-01-01"), files("2026-01-01"), files("2026-01-02")
    assert first == again != other and sorted(first) == sorted(other) and len(first) > 4
