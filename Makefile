# make demo   builds and installs the package in .venv and runs the demo
# make test   the same, and runs every test
# make test-gpu-fake  runs them in the mxnet-cu112 wheel, without a GPU
# make bench  measures against MXNet's operator, PyTorch if it is installed, and a plain copy
# make lint   format, lint and types
# make notebooks  runs the notebooks from top to bottom, with their assertions
# make docs   renders them in build/docs
# PYTHON=python3.8 chooses another Python (3.8 to 3.11), VENV=.venv38 another folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src/operator/* mxbn/*.py mxbn/*/*.py) setup.py build_images.py pyproject.toml
CXX_SOURCES := $(wildcard $(addprefix src/operator/*,.h .cc .cuh) $(addprefix tests/cuda/*,.h .c .cc))

.PHONY: demo test test-gpu-fake bench notebooks docs lint format wheel clean

demo: $(VENV)/installed
	$(BIN)/python -m mxbn demo

test: $(VENV)/installed
	$(BIN)/pytest --numprocesses 2

notebooks: $(VENV)/docs
	$(BIN)/pytest --nbmake notebooks

docs: $(VENV)/docs
	$(BIN)/python notebooks/render.py build/docs

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet 'mxbn[docs]'
	touch $@

bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet 'mxbn[bench]'
	$(BIN)/python benchmarks/batch_norm.py

# Installed anew whenever a source is newer; the compiled parts are made by setup.py.
$(VENV)/installed: $(VENV)/tools $(SOURCES)
	$(BIN)/python -m pip install --quiet '.[cpu,demo,tools,test]'
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

# On fake GPUs (see tests/cuda/fake_libraries.py), then on the CPU, without the tests of the fakes
# themselves. The wheel, of 499 MB, is kept.
GPU_FAKE := build/gpu-fake
GPU_FAKE_BIN := $(GPU_FAKE)/venv/bin
GPU_FAKE_ENVIRONMENT := LD_LIBRARY_PATH=$(CURDIR)/$(GPU_FAKE)/libraries FAKE_CUDA_DEVICES=2 \
  MXNET_USE_FUSION=0
GPU_TESTS := operator fused second_order golden errors symbol gluon threads processes guard gpu \
  sync_batch_norm

test-gpu-fake: $(GPU_FAKE)/venv/installed $(GPU_FAKE)/libraries/made
	$(GPU_FAKE_ENVIRONMENT) MXBN_TEST_DEVICE=gpu $(GPU_FAKE_BIN)/pytest -rfs \
	  $(GPU_TESTS:%=tests/test_%.py)
	$(GPU_FAKE_ENVIRONMENT) $(GPU_FAKE_BIN)/pytest -rfs \
	  --ignore-glob='tests/test_gpu*.py' --ignore-glob='tests/test_cuda_*.py'

$(GPU_FAKE)/libraries/made: $(GPU_FAKE)/venv/mxnet $(wildcard tests/cuda/* src/operator/*)
	$(GPU_FAKE_BIN)/python tests/cuda/fake_libraries.py \
	  $(GPU_FAKE)/venv/lib/python*/site-packages/mxnet/libmxnet.so $(@D)
	touch $@

$(GPU_FAKE)/venv/installed: $(GPU_FAKE)/venv/mxnet $(SOURCES)
	$(GPU_FAKE_BIN)/python -m pip install --quiet '.[cu112,demo,tools,test]'
	touch $@

$(GPU_FAKE)/venv/mxnet: $(GPU_FAKE)/wheels/downloaded
	$(MAKE) $(GPU_FAKE)/venv/tools VENV=$(GPU_FAKE)/venv
	$(GPU_FAKE_BIN)/python -m pip install --quiet $(GPU_FAKE)/wheels/*.whl
	touch $@

$(GPU_FAKE)/wheels/downloaded:
	$(PYTHON) -m pip download --quiet --no-deps --dest $(@D) mxnet-cu112==1.9.1
	touch $@

lint: $(VENV)/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_SOURCES)

$(VENV)/lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet 'mxbn[lint]'  # it is installed: only what lint adds
	touch $@

wheel: $(VENV)/tools
	$(BIN)/python -m pip install --quiet build==1.2.2
	$(BIN)/python -m build

clean:
	rm -rf build dist *.egg-info $(VENV)
