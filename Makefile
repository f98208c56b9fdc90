# `make demo` trains a small language model on this Python's own sources; `make test` passes the tests. Both need nothing but Python.
PYTHON ?= python3
NPROC ?= 1
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo digits test check nightly wheel-test curve clean

demo: $(INSTALLED)  ## train the language model; NPROC=2 for two processes
	$(BIN)/python examples/language_model.py --nproc $(NPROC)

digits: $(INSTALLED)  ## classify handwritten digits
	$(BIN)/python examples/digits.py --nproc $(NPROC)

test: check  ## lint, types and tests
	$(BIN)/python -m pytest -q

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(INSTALLED)  ## the tests that take longer than the gate allows
	$(BIN)/python -m pytest -q -m nightly

curve: $(INSTALLED)  ## train and draw docs/curve.png
	$(BIN)/python examples/plot_curve.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[examples,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
