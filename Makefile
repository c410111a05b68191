# Everything runs from .venv, which `make env` makes: nothing need be installed first but a Python 3.12 or 3.13.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env report test long faults pages differential admission grid accuracy cells jobs lab docs lint bench snapshots lock clean

BIN := .venv/bin
STUDY := data/studies/moonlight-16b.yaml
# What the checkers read; a folder that git does not track is not checked.
CODE := labkit notebooks benchmarks scripts tests

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: .venv/stamp  ## Make .venv as requirements.lock says; nothing to do when it is (PYTHON=... names another Python)

.venv/stamp: requirements.lock pyproject.toml scripts/make_env.sh
	@sh scripts/make_env.sh

report: env  ## Run the Moonlight recompute study and render figures/moonlight-16b.html
	@$(BIN)/labkit report $(STUDY)

# Tests start labkit hundreds of times: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# A process that a hanging test has ended (faulthandler_timeout) is not started again, only to hang again.
# One file's tests stay in one process: they share what their fixtures built. Files with slow tests come first (tests/conftest.py).
test: env  ## Run all tests but the long ones, most of the grid, loops of faults and the traces of documents (PYTEST_ARGS="-k name" for some)
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	    -m "not long and not grid and not faults and not pages" --durations 25 $(PYTEST_ARGS)

long: env  ## Run the tests of large workloads and of many seconds that `make test` leaves out
	@$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

faults: env  ## Kill runners, workers and ranks at 50 random moments each, damage results at every byte (half an hour)
	@$(BIN)/python -m pytest -m faults -o faulthandler_timeout=0 $(PYTEST_ARGS)

pages: env  ## Run the commands of tutorial and how-to pages, those that trace too, against what they show
	@$(BIN)/python -m pytest -m pages $(PYTEST_ARGS)

differential: env  ## Hold labkit's rules against Megatron Core's own validator, on 20,000 random workloads (DIFFERENTIAL_ARGS="--seed 2")
	@$(BIN)/python -m benchmarks.differential $(DIFFERENTIAL_ARGS)

admission: env  ## Try the properties of admission decisions on many more requests, and time decisions (minutes)
	@LABKIT_EXAMPLES=60 $(BIN)/python -m pytest tests/admission $(PYTEST_ARGS)
	@$(BIN)/python -m benchmarks.admission

grid: env  ## Hold the estimate against the trace on every workload of the grid
	@$(BIN)/python benchmarks/estimate_vs_trace.py $(GRID_ARGS)

accuracy: env  ## Hold the estimate against peaks measured on H200 (ACCURACY_ARGS="--cells FILE.csv" for others)
	@$(BIN)/python benchmarks/accuracy_h200.py $(ACCURACY_ARGS)

cells: env  ## Trace the cells measured on H200, beside the estimate (CELLS_ARGS="--only TEXT")
	@$(BIN)/python benchmarks/trace_h200.py $(CELLS_ARGS)

jobs: env  ## Trace Megatron-LM's own CI jobs and compare with their measured peaks (JOBS_ARGS="--only TEXT")
	@$(BIN)/python benchmarks/accuracy_megatron_ci.py $(JOBS_ARGS)

lab: env  ## Open the notebooks in JupyterLab (LAB_ARGS=--no-browser over ssh)
	@$(BIN)/labkit lab $(LAB_ARGS)

# Whoever makes the site need not read what becomes of MkDocs.
docs: env  ## Build the documentation site into site/ (open site/index.html; no server, no network)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: env  ## Check format, lint and types
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy $(CODE)

bench: env  ## Time the estimate, one trace cell and the six-cell study
	@$(BIN)/python benchmarks/speed.py

snapshots: env  ## Read memory snapshots of 200 MB, PyTorch's and hostile ones; fails beyond 30 s or 2 GiB
	@$(BIN)/python -m benchmarks.snapshots $(SNAPSHOTS_ARGS)

# uv is no part of the environment: only who changes a dependency needs it.
lock:  ## Resolve pyproject.toml into requirements.lock again (needs uv)
	uv pip compile --universal --python-version 3.12 --extra dev --generate-hashes --no-emit-index-url --no-header \
	    --no-annotate --output-file requirements.lock pyproject.toml

clean:  ## Remove the environment, the caches and the rendered reports (kept results stay)
	rm -rf .venv .venv.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis site figures/*.html figures/*.ipynb
	find labkit tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
