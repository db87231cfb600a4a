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
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	$(BIN)/python examples/demo/classifier.py $(DEMO)
	$(BIN)/smelt compress $(DEMO)/classifier -r examples/demo/encoder.yaml --max-drop 2pt -o $(DEMO)/classifier-int8
	$(BIN)/smelt compress smollm2-135m -r examples/demo/language-model.yaml --max-drop 3% --speed-seconds 15 \
		--prompt "The most important thing about water is" -o $(DEMO)/smollm2-int8
	$(BIN)/python examples/demo/ask.py $(DEMO)/smollm2-int8 "Why is the sky blue?"
	@echo "the reports: $(DEMO)/classifier-int8/report.html and $(DEMO)/smollm2-int8/report.html"

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
