# Every target works in a fresh clone: the environment is made on first use and again when what it depends on changes.
# To use other versions than the recorded ones:  make test CONSTRAINTS=
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= results/demo
NAME ?= toy

.DEFAULT_GOAL := help
.PHONY: help run study test bench lint docs clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[tests]"
	@touch $@

run: $(STAMP)  ## the demonstration: a zoo of small transformers, measured, with a report in results/demo
	$(BIN)/quotient-manifolds demo --out $(OUT)

# Sentences of a source distribution, by its hash; pip knows where distributions are.
SENTENCES := results/sentences/vaderSentiment-3.3.2.tar.gz
$(SENTENCES): $(STAMP)
	mkdir -p $(@D)
	echo "vaderSentiment==3.3.2 --hash=sha256:5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9" > $(@D)/wanted.txt
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --require-hashes -r $(@D)/wanted.txt -d $(@D)
	touch $@

study: $(STAMP) $(if $(filter sentiment pilots training,$(NAME)),$(SENTENCES))  ## one of the studies, into results/NAME:  make study NAME=toy
	PYTHONPATH=notebooks $(BIN)/python -m studies $(NAME) $(ARGS)

test: $(STAMP)  ## all tests and doctests
	$(BIN)/python -m pytest

bench: $(STAMP)  ## costs, as ratios within one run
	$(BIN)/python -m pytest -n 0 tests/benchmarks --benchmark-only

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment, caches and build products (results stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
