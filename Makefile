PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

# Tests run four ranks on two cores, so each process has one thread. Results depend on the number of
# threads, because it changes the order of sums.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test pure_then_cpu lint_then_pages pure cpu pages campaign versions types docs lint format clean gpu

demo: $(READY)
	$(BIN)/python examples/demo.py

# `lint` and `pages` use one core each, so they run in parallel with the tests of other folders. Their
# output is printed at the end.
test: $(READY)
	@mkdir -p build
	@code=0; $(MAKE) --no-print-directory -j2 -k pure_then_cpu lint_then_pages || code=$$?; \
	echo "== make lint pages"; cat build/lint_and_pages.log; exit $$code

pure_then_cpu:
	@code=0; $(MAKE) pure || code=$$?; $(MAKE) cpu || code=$$?; exit $$code

lint_then_pages:
	@code=0; { $(MAKE) lint || code=$$?; $(MAKE) pages || code=$$?; } >build/lint_and_pages.log 2>&1; exit $$code

pure: $(READY)
	$(BIN)/pytest -n 2 tests/pure

cpu: $(READY)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 schedir tests/cpu

pages: docs
	SCHEDIR_SITE=build/site $(BIN)/pytest tests/gpu tests/browser

# Build the site of all pages in build/site. A dead link is an error, and so is a page that no other
# page lists.
docs: $(READY)
	rm -rf build/site
	$(BIN)/sphinx-build -b html -c docs -E -W --keep-going -q . build/site
	@echo "open build/site/index.html"

# `make pure` and `make cpu` run samples. This runs everything: all examples of each property, all
# combinations, each script of benchmarks/ on small sizes, all faults and kills of processes, and the
# tests that emulate NCCL on a CPU.
campaign: $(READY)
	ALL_CASES=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 schedir tests/pure tests/cpu

# Test the lowest and the newest supported torch, the newest torchtitan, and a plain install in each
# Python of this machine. The versions of torch are downloads of gigabytes.
versions: $(READY)
	$(BIN)/python -m tests.versions

# Check that pyright knows the type of each public name. This downloads pyright and Node.js.
types: $(READY)
	$(BIN)/python -m tests.public_types

# Run the GPU checks. PYTHON must have a torch with CUDA. ARGS are arguments of benchmarks/gpu_run.py.
gpu:
	$(PYTHON) benchmarks/gpu_run.py $(ARGS)

# ruff's cache would keep old results about the order of imports when a new module changes the order.
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
