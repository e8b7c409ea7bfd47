# make demo: set everything up and ask a mesh of real processes a question.   make test: every check.   make help: the rest.
# ARGS goes to the command:  make demo ARGS="--workers 5 --recipe torch-f32"

PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11,\
	$(shell command -v $(python) >/dev/null 2>&1 && $(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $(python))) python3)
ARGS ?=
MODEL := smollm2-135m-instruct
BIN := .venv/bin
INSTALLED := .venv/installed

# Byte code is written once, at set-up; without it every start would compile torch and libp2p again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup model demo test check-format check-lint check-types check-imports check-tests clients bench sim docs format clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(INSTALLED) model  ## Make .venv with the pinned dependencies, and bring the model

# Whatever set-up prints goes to standard error: `make demo ARGS=--json` has one JSON object on standard output.
# The native kernels are part of the package, so that they are built with it.
KERNELS := setup.py $(wildcard tessella_p2p/stages/native/*.[ch])

$(INSTALLED): pyproject.toml constraints.txt $(KERNELS)
	@.ci/prerequisites '$(PYTHON)' >&2
	@$(BIN)/python -c '' 2>/dev/null || { echo 'making .venv' >&2; '$(PYTHON)' -m venv --clear .venv >&2; }
	@echo 'installing what constraints.txt pins (a minute or two)' >&2
	@$(BIN)/python -m pip install --quiet --compile --constraint constraints.txt --editable '.[test,tools]' >&2
	@# libp2p brings trio-typing, whose stubs describe a trio of years ago and hide trio's own types from mypy.
	@rm -rf $(BIN)/../lib/python3*/site-packages/trio-stubs
	@touch $@

model: $(INSTALLED)
	@$(BIN)/tessella-p2p models pull $(MODEL) >&2

demo: setup  ## Run a whole mesh on this machine and ask it a question
	@$(BIN)/tessella-p2p demo $(ARGS)

test: check-format check-lint check-types check-imports check-tests  ## Every check: format, lint, types, import contract, tests

check-format: $(INSTALLED)
	$(BIN)/ruff format --check .

check-lint: $(INSTALLED)
	$(BIN)/ruff check .

check-types: $(INSTALLED)
	$(BIN)/mypy

check-imports: $(INSTALLED)
	$(BIN)/lint-imports

check-tests: setup
	$(BIN)/pytest $(ARGS)

# Programs of others, which have dependencies of their own: none of them is needed for anything else.
CLIENTS := tests/clients
PYTHON_CLIENTS := .venv-clients/installed
NODE_CLIENTS := $(CLIENTS)/javascript/node_modules/.package-lock.json

$(PYTHON_CLIENTS): $(CLIENTS)/python/requirements.txt
	'$(PYTHON)' -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --no-compile --requirement $<
	@touch $@

$(NODE_CLIENTS): $(CLIENTS)/javascript/package-lock.json
	cd $(CLIENTS)/javascript && npm ci --ignore-scripts --no-audit --no-fund

clients: setup $(PYTHON_CLIENTS) $(NODE_CLIENTS)  ## Ask a mesh with openai, llm, litellm, langchain, … (needs node)
	$(BIN)/pytest -rA $(CLIENTS) $(ARGS)

bench: setup  ## Measure beside llama.cpp; ARGS names groups, --rounds N or --json FILE
	@$(BIN)/python -m benchmarks $(ARGS)

sim: $(INSTALLED)  ## Simulate a hundred nodes under churn, in virtual time
	@$(BIN)/tessella-p2p sim $(or $(ARGS),churn)

docs: $(INSTALLED)  ## Write docs/SETTINGS.md anew
	$(BIN)/tessella-p2p settings >docs/SETTINGS.md

format: $(INSTALLED)  ## Format the code, and mend what lint can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove .venv and every cache of this folder; models and keys stay
	rm -rf .venv .venv-clients $(CLIENTS)/javascript/node_modules build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
