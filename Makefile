# make train and make test install everything. They need only Python 3.11 or newer, with venv and pip.
PYTHON ?= python3
VENV ?= .venv
SLOW ?= tests
TESTS ?= tests

.PHONY: train test types test-slow test-part test-cache test-newest test-oldest test-hugging-face faults docs tutorials exercises structure gpu compile-devices lint pages-style clean

train: $(VENV)/installed
	$(VENV)/bin/python train.py --config=configs/tiny.py

test: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -q -n 2 --dist=worksteal -m "not slow" $(TESTS)

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

test-slow: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -n 2 --dist=worksteal -m "slow and not exhaustive" $(SLOW)

# Run the slow tests in an order that each day's commits change, for MINUTES; print what was not run.
MINUTES ?= 15
test-part: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -n 2 -m "slow and not exhaustive" --minutes=$(MINUTES) \
	  --order=$$(git show --no-patch --format=%cs) $(SLOW)

# Compare the KV cache with a full forward pass: also all encodings × variants of attention × windows × documents.
test-cache: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -n 2 -m "slow or not slow" tests/generation/test_cache.py

# Test export to and import from Transformers, with PyTorch.
test-hugging-face: .venv-hugging-face/installed
	.venv-hugging-face/bin/python -m pytest -q tests/hugging_face

# Kill training processes at random times, and compare them with an uninterrupted run (15 minutes).
faults: $(VENV)/installed-dev
	$(VENV)/bin/python -m tests.faults.kills --kills=200

# Run all tests with the newest supported Python of this machine, on the PATH or in pyenv.
NEWER = python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13*/bin/python3 \
        python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3
test-newest:
	@for python in $(NEWER); do \
	  if "$$python" -c '' 2>/dev/null; then exec $(MAKE) test test-slow PYTHON="$$python" VENV=.venv-newest; fi; \
	done; echo "no Python newer than 3.11 found: nothing to do"

# Run all tests with the oldest versions that requirements.txt allows.
test-oldest:
	$(MAKE) .venv-oldest/installed-dev VENV=.venv-oldest
	sed -n 's/^\([A-Za-z0-9_-]*\)>=\([0-9.]*\)[^;#]*\(;[^#]*\)*.*/\1==\2 \3/p' requirements.txt > .venv-oldest/oldest.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -r .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pytest -q -n 2 -m "not exhaustive" tests

# Build the docs site in site/. A broken link or anchor is an error.
docs: .venv-docs/installed $(VENV)/installed
	MINI_GPT_PYTHON=$(VENV)/bin/python NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# Execute the notebooks of the tutorials (six minutes).
tutorials: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q tests/tutorials/test_notebooks.py

# Check the answers to the exercises of the tutorials.
exercises: $(VENV)/installed-dev
	$(VENV)/bin/python -m docs.tutorials.exercises

# Print how many lines and files there are, and how many of them a training run loads.
structure: $(VENV)/installed-dev
	$(VENV)/bin/python -m tests.structure

# Check and measure on an NVIDIA GPU for at most 15 minutes. Needs no network: PYTHON has JAX with CUDA, PyTorch, Transformers.
gpu:
	$(PYTHON) -m benchmarks.gpu

# Compile training steps for TPUs, which need not be there, with the compiler of PyPI's libtpu.
compile-devices: .venv-devices/installed
	.venv-devices/bin/python -m pytest -q tests/devices

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	! command -v npx > /dev/null || $(PRETTIER) --write --log-level=warn

# Check the style of the pages' scripts. Needs npm.
PRETTIER = npx --yes prettier@3.10.1 'mini_gpt/pages/**/*.js' '!**/vendor/*'
pages-style:
	$(PRETTIER) --check

clean:
	rm -rf .venv .venv-newest .venv-oldest .venv-hugging-face .venv-devices .venv-docs site

.venv-docs/installed: requirements-docs.txt
	@$(MAKE) --no-print-directory .venv-docs/bin/python VENV=.venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

.venv-hugging-face/installed: requirements-hugging-face.txt requirements-dev.txt requirements.txt
	@$(MAKE) --no-print-directory .venv-hugging-face/bin/python VENV=.venv-hugging-face
	.venv-hugging-face/bin/pip install --quiet --disable-pip-version-check -r requirements-hugging-face.txt
	@touch $@

.venv-devices/installed: requirements-dev.txt requirements.txt
	@$(MAKE) --no-print-directory .venv-devices/bin/python VENV=.venv-devices
	.venv-devices/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt 'jax[tpu]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "$(PYTHON) is missing or older than 3.11: install Python 3.11 or newer, or name one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv: install it (Debian and Ubuntu: apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt | $(VENV)/bin/python
	@echo "Installing the packages of requirements.txt in $(VENV), which takes one to three minutes."
	$(VENV)/bin/pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt requirements.txt | $(VENV)/bin/python
	@echo "Installing the packages of requirements-dev.txt in $(VENV), which takes one to three minutes."
	$(VENV)/bin/pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $@ $(VENV)/installed
