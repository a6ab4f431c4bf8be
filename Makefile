PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

# One thread per process: four ranks share few cores, and the same thread count gives the same bits.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test pure cpu pages campaign versions types docs lint format clean gpu

demo: $(READY)
	$(BIN)/python examples/demo.py

# One after the other; .ci/run has some of them beside each other.
test: lint pure cpu pages

pure: $(READY)
	$(BIN)/pytest -n 2 schedir tests/pure

cpu: $(READY)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 tests/cpu

pages: docs
	SCHEDIR_SITE=build/site $(BIN)/pytest tests/gpu tests/browser

# A site of all pages, in build/site; a dead link, or a page that is nowhere in its tree, is an error.
docs: $(READY)
	rm -rf build/site
	$(BIN)/sphinx-build -b html -c docs -E -W --keep-going -q . build/site
	@echo "open build/site/index.html"

# What `make pure` and `make cpu` have samples of: all examples of each property, all combinations,
# every script of benchmarks/ on small sizes, all faults and kills of processes, and the tests of
# NCCL on a CPU.
campaign: $(READY)
	ALL_CASES=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 tests/pure tests/cpu

# Tests with the lowest and the newest supported torch, which are downloads of gigabytes, and a plain
# install in each Python of this machine.
versions: $(READY)
	$(BIN)/python -m tests.versions

# Whether pyright knows the type of each public name. It downloads pyright and Node.js.
types: $(READY)
	$(BIN)/python -m tests.public_types

# What is run where there is a GPU: PYTHON is one whose torch has CUDA, ARGS as benchmarks/gpu_run.py takes.
gpu:
	$(PYTHON) benchmarks/gpu_run.py $(ARGS)

# ruff's cache keeps a verdict on the order of imports when a new module changes it.
lint: $(READY)
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tests.sentences

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist *.egg-info

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
