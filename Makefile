# `make demo` trains a small language model on this Python's own sources; `make test` passes the tests. Both need nothing but Python.
PYTHON ?= python3
NPROC ?= 1
N ?= 20
SEED ?= 0
MINUTES ?= 29
PART ?= tests
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# Each process of the tests would compile the tests again if the environment forbids to keep what is compiled.
COMPILED := env -u PYTHONDONTWRITEBYTECODE
# On all cores, at most eight; a worker that has run out of tests takes over some of another's.
PYTEST := $(COMPILED) $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal
BENCH_VENV := .venv-bench
XLA_VENV := .venv-xla
DOCS_VENV := .venv-docs
BENCH_INSTALLED := $(BENCH_VENV)/installed

# A thread that waits would spin, and take a core from threads that work. The benchmarks run as users do, without this setting.
export OMP_WAIT_POLICY = passive

.PHONY: demo digits quick test slow test-all check nightly without-fast mutants torch-versions ignite-suite libraries recipes migration simulated-accelerator xla-test wheel-test docs gallery curve bench bench-gpu clean

demo: $(INSTALLED)  ## train the language model; NPROC=2 for two processes
	@echo "Training a small GPT on the source text of Python's standard library, for some minutes. Ctrl-C stops and saves it."
	$(BIN)/python examples/language_model.py --nproc $(NPROC)

digits: $(INSTALLED)  ## classify handwritten digits
	$(BIN)/python examples/digits.py --nproc $(NPROC)

quick: check  ## lint, types, and the tests that failed when they were last run
	$(COMPILED) $(BIN)/python -m pytest -q -m 'not nightly' --last-failed --last-failed-no-failures none || test $$? -eq 5

test: check  ## lint, types and tests
	$(PYTEST)

slow: $(INSTALLED)  ## the laws of `test` on all of their cases: what it leaves out
	$(PYTEST) -m 'slow and not nightly'

test-all: check  ## lint, types and all tests but the nightly ones
	$(PYTEST) -m 'not nightly'

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell *.md docs ignite_train handlers examples benchmarks tests
	$(BIN)/mypy

nightly: $(INSTALLED)  ## the tests that take longer than the gate allows; PART=tests/update for a part of them
	$(COMPILED) $(BIN)/python -m pytest -q -m nightly $(PART)
	test "$(PART)" != tests || $(MAKE) without-fast

without-fast: $(INSTALLED)  ## the tests of `test` and `slow` without the accelerations of fast/
	IGNITE_TRAIN_FAST=0 $(PYTEST) -p no:cacheprovider -m 'not nightly'

mutants: $(INSTALLED)  ## change the library at random and see which changes no test notices; N=300 SEED=1 for others
	$(BIN)/python tests/commands/mutants.py --slow --number $(N) --seed $(SEED) --jobs 2

torch-versions:  ## the tests with the oldest and the newest torch, into docs/torch_versions.md; TORCH="2.14.1" for others
	$(PYTHON) tests/commands/torch_versions.py $(TORCH)

ignite-suite: $(INSTALLED)  ## Ignite's own tests, and the code of its documentation, with our trainer in the place of its Engine; PARTS="engine" for some, PARTS=--pre for the newest pre-release, IGNITE_SOURCE=path offline
	$(BIN)/python tests/ignite_suite/run.py $(PARTS)

libraries: $(INSTALLED)  ## training with the libraries that people use, into docs/libraries.md; LIBRARIES="timm peft" for some; downloads some GB once
	$(BIN)/python tests/libraries/run.py $(LIBRARIES)

recipes: $(INSTALLED)  ## LoRA, a ViT, a segmentation, DPO, GRPO and PPO beside loops by hand and the libraries' own trainers, into docs/recipes.md
	$(BIN)/python benchmarks/recipes.py

migration: $(INSTALLED) $(BENCH_INSTALLED)  ## the scripts of docs/migration.md, of the peers and ours, with their numbers compared; downloads the peers once
	PEERS_PYTHON=$(BENCH_VENV)/bin/python $(COMPILED) $(BIN)/python -m pytest -q -m 'nightly or not nightly' tests/examples/test_migration.py

simulated-accelerator:  ## the tests on an accelerator that is simulated on the CPU, see docs/accelerators.md; builds it once; ACCELERATOR_SOURCE=path offline
	$(PYTHON) tests/commands/simulated_accelerator.py

xla-test: $(XLA_VENV)/installed  ## train the table of cuts on a device of torch_xla on the CPU, see docs/xla.md; downloads some GB once
	PJRT_DEVICE=CPU $(XLA_VENV)/bin/python tests/commands/xla_cuts.py

# torch_xla needs the torch of its own version, which is older than what the library is for.
$(XLA_VENV)/installed: constraints.txt
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet torch==2.9.0 torch_xla==2.9.0
	$(XLA_VENV)/bin/python -m pip install --quiet --no-deps -c constraints.txt pytorch-ignite packaging
	touch $@

wheel-test: $(INSTALLED)  ## the tests of `test` against the built wheel, where no checkout is near
	there=$$(mktemp -d) && trap 'rm -rf "$$there"' EXIT && python="$$PWD/$(BIN)/python" && \
	"$$python" -m build --no-isolation --wheel --outdir "$$there/dist" . > /dev/null && \
	"$$python" -m pip install --quiet --no-index --no-deps --target "$$there/installed" "$$there"/dist/*.whl && \
	cp -R tests examples conftest.py pyproject.toml README.md "$$there" && \
	cd "$$there" && export PYTHONPATH="$$there/installed" && \
	"$$python" -c 'import ignite_train.handlers as h, sys; sys.exit(not h.__file__.startswith(sys.argv[1]))' "$$there" && \
	$(COMPILED) "$$python" -m pytest -q -n auto --maxprocesses 8 --dist worksteal -o pythonpath=tests/support tests && \
	"$$python" -m pytest -q -o pythonpath= --pyargs ignite_train

gallery: $(INSTALLED)  ## draw docs/pictures/kills.png, cost.png, scaling.png and goodput.png
	$(BIN)/python examples/gallery.py kills
	$(BIN)/python examples/gallery.py cost
	$(BIN)/python examples/gallery.py scaling
	$(BIN)/python benchmarks/goodput.py --check --picture docs/pictures/goodput.png

docs: $(DOCS_VENV)/installed  ## the site, into site/; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build

# The docstrings are read and not imported: neither torch nor the library is needed.
$(DOCS_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' | \
	  $(DOCS_VENV)/bin/python -m pip install --quiet -r /dev/stdin
	touch $@

curve: $(INSTALLED)  ## train and draw docs/curve.png
	$(BIN)/python examples/plot_curve.py

bench: $(BENCH_INSTALLED)  ## measure against the peers and write benchmarks/results.md and benchmarks/scaling.md; ONLY="overhead" for one script
	env -u OMP_WAIT_POLICY $(BENCH_VENV)/bin/python benchmarks/write_results.py $(addprefix --only ,$(ONLY))

bench-gpu: $(BENCH_INSTALLED)  ## measure on one GPU and write benchmarks/results-gpu.md; PARTS="speed trace" for some, MINUTES=29
	env -u OMP_WAIT_POLICY $(BENCH_VENV)/bin/python benchmarks/gpu.py --minutes $(MINUTES) $(addprefix --part ,$(PARTS))

# Apart from the library's own environment, so that nothing of the peers can be imported there by mistake.
$(BENCH_INSTALLED): pyproject.toml constraints.txt benchmarks/constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt --editable '.[examples]'
	grep -v '^#' benchmarks/requirements.txt | while read -r peer; do \
	  $(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt -c benchmarks/constraints.txt "$$peer" || \
	  echo "left out: $$peer could not be installed"; done
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12 ..." % \
	  sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "1 of 3: making an environment in $(VENV), once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	@echo "2 of 3: installing torch, some hundred MB to download"
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	@echo "3 of 3: installing ignite_train and what its examples and tests need"
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[examples,dev]'
	touch $@

clean:
	rm -rf site $(VENV) $(BENCH_VENV) $(DOCS_VENV) $(XLA_VENV) .venv-libraries .venv-accelerator .venv-torch-* .ignite-suite build dist *.egg-info runs
