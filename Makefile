# Everything runs in a virtual environment of its own; all it takes is Python 3.11 to 3.14 and make.
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

docs: $(VENV)/.installed-docs  ## The documentation site, in site/
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV)

# If an installation fails, the end of pip's output names the packages that conflict; pip -q hides them.
install = @echo "pip install $(1)"; \
	$(BIN)/python -m pip install $(1) > $(VENV)/pip.log 2>&1 || { tail -n 20 $(VENV)/pip.log >&2; exit 1; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("ppo_lightning needs Python 3.11 or newer, and $(PYTHON) is %d.%d: pass another one, as in make PYTHON=python3.13." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,-c constraints.txt -e .)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(call install,-c constraints.txt -e '.[docs]')
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-procgen.txt
	$(call install,-c constraints.txt -e '.[dev]')
	$(call install,--no-deps -r requirements-procgen.txt)
	touch $@
