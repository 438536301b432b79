# make demo   builds and installs the package in .venv and runs the demo
# make test   the same, and runs every test
# make bench  measures against MXNet's operator, PyTorch if it is installed, and a plain copy
# make lint   format, lint and types
# PYTHON=python3.8 chooses another Python (3.8 to 3.11), VENV=.venv38 another folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src/operator/* mxbn/*.py mxbn/*/*.py) setup.py pyproject.toml

.PHONY: demo test bench lint format wheel clean

demo: $(VENV)/installed
	$(BIN)/python -m mxbn demo

test: $(VENV)/installed
	$(BIN)/pytest

bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet '.[bench]'
	$(BIN)/python benchmarks/batch_norm.py

# Installed anew whenever a source is newer; the compiled parts are made by setup.py.
$(VENV)/installed: $(VENV)/tools $(SOURCES)
	$(BIN)/python -m pip install --quiet '.[cpu,demo,test]'
	touch $@

$(VENV)/tools:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' || { \
	  echo "mxbn needs Python 3.8 to 3.11 (MXNet 1.9.1 runs on no newer one); $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@command -v $(firstword $(or $(CXX),g++)) > /dev/null || { \
	  echo "mxbn needs the C++ compiler g++, which was not found. Install it," \
	    "for example with: apt-get install g++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

lint: $(VENV)/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror src/operator/*.h src/operator/*.cc
	$(BIN)/mypy

format: $(VENV)/lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i src/operator/*.h src/operator/*.cc

$(VENV)/lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet '.[lint]'
	touch $@

wheel: $(VENV)/tools
	$(BIN)/python -m pip install --quiet build==1.2.2
	$(BIN)/python -m build

clean:
	rm -rf build dist *.egg-info $(VENV)
