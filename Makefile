# `make train` and `make test` are all a fresh machine needs; they make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test lint bench install clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt 'torch==2.13.0'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/.installed

train: install
	$(BIN)/python jobs/train_gpt.py --num-workers 2 --memory-budget 24MiB --global-batch 16 --steps 300 \
		--out runs/$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: install
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	for file in benchmarks/*.py; do $(BIN)/python $$file --quick || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info
