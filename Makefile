# Everything runs in a virtual environment of its own; all it takes is Python 3.11 to 3.14 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/first/cartpole.yaml

QUICK := $(addprefix tests/, \
	algorithms/test_losses.py algorithms/test_ppo.py algorithms/test_schedule.py algorithms/test_update.py \
	models/test_actor.py models/test_continuous.py models/test_kl.py models/test_mlp.py models/test_models.py \
	models/test_networks.py \
	offpolicy/test_buffer.py offpolicy/test_losses.py \
	rollouts/test_collector.py rollouts/test_progress.py \
	spaces/test_spaces.py \
	utils/test_scans.py utils/test_seeding.py \
	stories/test_plain_trainer.py::test_a_fit_after_a_validation_of_a_checkpoint_trains_a_whole_run \
	stories/test_resume.py::test_an_interrupted_run_ends_as_the_uninterrupted_one_to_the_bit[CartPole-v1])

.PHONY: train quick test test-integration test-slow attack lint format docs clean

train: $(VENV)/.installed  ## Train CartPole-v1; more options: make train ARGS="--seed_everything 2"
	$(BIN)/ppo-lightning fit --config $(CONFIG) $(ARGS)

# One process and no extras: tests that say which function is at fault, of most rooms that a run passes.
quick: $(VENV)/.installed-quick  ## While you work: a minute on two cores, without the packages of the extras
	$(BIN)/python -m pytest --skip-missing $(QUICK) $(ARGS)

test: $(VENV)/.installed-dev  ## Everything that needs one process (6 to 12 minutes on 2 cores)
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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

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

$(VENV)/.installed-quick: $(VENV)/.installed
	$(call install,-c constraints.txt pytest)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-procgen.txt
	$(call install,-c constraints.txt -e '.[dev]')
	$(call install,--no-deps -r requirements-procgen.txt)
	touch $@
