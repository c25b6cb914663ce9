# The four commands are `make lab`, `make test`, `make lint` and `make size`; README has the same without make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# torch is installed first and by its exact version, so that no other package can ask for another one.
# For a CPU-only build on Linux: make lab TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH := $(shell grep '^torch==' constraints.txt)
TORCH_ARGS ?=
ARGS ?=
JOBS ?= 2
LECTURES := $(wildcard notebooks/[0-9]*.ipynb) $(wildcard notebooks/guides/*.ipynb)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
NBVAL := -p tests.nbval_history --nbval --nbval-sanitize-with tests/nbval.cfg --nbval-kernel-name python3

.PHONY: lab test test-all bench size lint notebooks compat audit soak clean

$(BIN)/python:
	@echo "making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch-$(TORCH): | $(BIN)/python
	@echo "installing $(TORCH): some minutes the first time"
	@$(PIP) $(TORCH_ARGS) $(TORCH)
	touch $@

# A stamp is newer than what it was made from: a second run of any command sets nothing up again.
$(VENV)/.lab: pyproject.toml constraints.txt binder/jupyterlab-settings.json | $(VENV)/.torch-$(TORCH)
	@echo "installing JupyterLab and the widget"
	@$(PIP) --editable '.[lab]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt binder/jupyterlab-settings.json | $(VENV)/.torch-$(TORCH)
	@echo "installing all extras and the tools"
	@$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.lab

lab: $(VENV)/.lab
	@echo "starting JupyterLab; its address comes in a moment"
	@$(BIN)/fxlab lab $(ARGS)

test: $(VENV)/.dev
	FXLAB_TEST=1 $(PYTEST) -m "not slow" $(NBVAL) tests fxlab $(LECTURES) $(ARGS)

test-all: $(VENV)/.dev
	FXLAB_LONG=1 $(PYTEST) $(NBVAL) tests fxlab $(LECTURES) $(ARGS)

bench: $(VENV)/.dev
	@for script in tests/bench/bench_*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$script $(ARGS) || exit 1; done

size: $(BIN)/python
	@$(BIN)/python tests/size.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

notebooks: $(VENV)/.dev
	$(BIN)/python tests/run_notebooks.py $(or $(ARGS),$(LECTURES))

# The oldest torch that is supported and the newest there is, each in an environment of its own.
compat: $(VENV)/.dev
	$(BIN)/python -m tests.compat $(TORCH_ARGS)

audit: $(VENV)/.dev
	$(BIN)/python -m tests.audit_pins

soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
