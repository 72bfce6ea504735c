# Everything runs in a virtual environment of its own; all it takes is Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/classic/cartpole.yaml

.PHONY: train test test-integration test-slow attack lint format docs clean

train: $(VENV)/.installed  ## Train CartPole-v1; more options: make train ARGS="--seed_everything 2"
	$(BIN)/ppo-lightning fit --config $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev  ## The quick tests (6 to 12 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-integration: $(VENV)/.installed-dev  ## Processes, graphs, notebooks, documented commands (22 minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "integration and not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev  ## The learning runs, series of processes, scripts (45 minutes)
	$(BIN)/python -m pytest -m slow $(ARGS)

attack: $(VENV)/.installed-dev  ## Kill runs, damage files, fill the disk, draw settings (20 minutes)
	$(BIN)/python benchmarks/attack.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev  ## The documentation site, in site/
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-procgen.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -r requirements-procgen.txt
	touch $@
