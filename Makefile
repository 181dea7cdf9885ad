# make serve   create .venv, start a server on the built-in model, print how to talk to it
# make chat    talk to that server from this terminal
# make test    the tests that need no GPU and no patience (minutes); make test-slow runs the rest
# make lint    formatting, lint and types

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
MODEL ?= nano
PORT ?= 30000
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: serve chat test test-slow lint clean

serve: $(VENV)/.serve
	@exec env -u OMP_NUM_THREADS $(BIN)/k3 serve --model-path $(MODEL) --port $(PORT)

chat: $(VENV)/.serve
	$(BIN)/k3 chat --base-url http://127.0.0.1:$(PORT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" tests/unit tests/cpu

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout=3600 tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "k3stack needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 serve"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing k3stack into $(VENV) (torch is large: some minutes the first time)"
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP) -e '.[serve,dev]'
	@touch $@

clean:
	rm -rf $(VENV)
