# Commands for a fresh machine, each sets everything up first: `make demo`, `make test`, `make test-all`, which adds the
# slow tests, and `make mutants`, which tests the tests: it breaks the source in small ways that they must notice.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := demo
WORKERS ?= 2
PARALLEL := --numprocesses $(WORKERS) --dist loadfile

.PHONY: demo test test-all mutants check setup docs lock build clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	rm -rf $(DEMO)/small $(DEMO)/small.partial
	mkdir -p $(DEMO)
	$(BIN)/smelt compress smollm2-135m -r examples/prune-20.yaml -o $(DEMO)/small \
		--prompt "The most important thing about water is" --json $(DEMO)/result.json
	@echo "the report: $(DEMO)/small/report.html"

check: setup
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: check
	$(BIN)/python -m pytest $(PARALLEL)

mutants: setup
	$(BIN)/python -m tests.mutants.run --jobs $(WORKERS) --json benchmarks/results/mutants.json

# The generated pages, then the site in site/index.html.
docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/make_methods.py
	$(BIN)/python docs/make_families.py
	$(BIN)/python docs/make_commands.py
	$(BIN)/python -m mkdocs build --quiet --strict

# The exact releases, with hashes, that a release was tested with; `constraints.txt` stays the pin for development, since
# machines install different builds of torch.
lock: setup
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --generate-hashes --universal --python-version 3.11 \
		--constraint constraints.txt --custom-compile-command "make lock" --quiet --output-file requirements-release.lock

# Wheel and source distribution of `smeltml`; `make test-all` installs the wheel in an environment of its own.
build: setup
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(DEMO) build dist site *.egg-info
