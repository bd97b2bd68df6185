# Two commands for a newcomer: `make run` trains the miniature, `make test` checks the house.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint setup prove-miniature prove-model prove-exchange prove-boring bench-envs bench-train-step clean

run: $(STAMP)  ## install, then train the miniature on real text (about 4 minutes on two cores)
	@$(BIN)/noon run experiments/miniature.py

test: $(STAMP) lint  ## lint, storeys, tests (at most 4 minutes)
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	@$(BIN)/ruff check noonsight experiments tests proofs benchmarks
	@$(BIN)/ruff format --check noonsight experiments tests proofs benchmarks
	@$(BIN)/lint-imports --no-cache | tail -n 6

setup: $(STAMP)  ## make the environment only

prove-miniature: $(STAMP)  ## five seeds of the whole voyage and everything issue 2 wants; writes proofs/miniature.json (25 minutes)
	@$(BIN)/python -m proofs.miniature

prove-model: $(STAMP)  ## everything issue 3 wants of model and optimiser; writes proofs/model.json (over an hour, goes on when killed)
	@$(BIN)/python -m proofs.optimizers && $(BIN)/python -m proofs.model

prove-exchange: $(STAMP)  ## everything issue 4 wants of exchanges, meshes and rehearsals; writes proofs/exchange.json (an hour)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[rehearse-gpu,rehearse-tpu]' && $(BIN)/python -m proofs.exchange

prove-boring: $(STAMP)  ## everything issue 5 wants: faults, restarts, saves, sentinels; writes proofs/boring.json (half an hour, idle machine)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check orbax-checkpoint && $(BIN)/python -m proofs.boring

bench-envs:  ## environments of the peers, in .venv-bench (minutes, some GB)
	@$(PYTHON) -m venv .venv-bench/torch && .venv-bench/torch/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0" "transformers>=5,<6"
	@$(PYTHON) -m venv .venv-bench/levanter && .venv-bench/levanter/bin/python -m pip install --quiet --disable-pip-version-check "marin-levanter==0.2.20.dev202606180959" gitpython

bench-train-step: $(STAMP)  ## train steps side by side with the peers; writes benchmarks/results/train_step.json (an hour, idle machine)
	@$(BIN)/python benchmarks/train_step.py --write

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "noonsight needs Python 3.11 or newer; $(PYTHON) is %d.%d. What to do: make run PYTHON=python3.11" % v[:2])'
	@echo "making the environment in $(VENV) (once; needs the network)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

clean:  ## remove the environment; results in voyages/ stay
	rm -rf $(VENV)
