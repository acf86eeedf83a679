# Everything runs in .venv, which the first target that needs it makes. Needs python3 (3.11 or newer), make and g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hqsweep-installed
# The editable install looks for cmake and ninja here.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: quickstart test gpu-test build lint clean

quickstart: $(STAMP)  ## train six recipes on real text and write reports/quickstart
	$(BIN)/hqsweep run conf=quickstart
	$(BIN)/hqsweep compare quickstart --baseline bf16 --band 0.15

test: $(STAMP)  ## the whole suite
	$(BIN)/python -m pytest -n 2 -q

build: $(STAMP)  ## compile csrc/ if it changed, and say what was built
	$(BIN)/python -c "from hqsweep import _C; print(_C.build_info())"

lint: $(STAMP)
	$(BIN)/ruff check .

# On a machine with a GPU whose own python3 has torch, pytest and the build tools; needs no network and no .venv.
GPU_SITE := build/gpu-site
gpu-test:
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu-test: torch sees no GPU')"
	$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target $(GPU_SITE) \
	  -C build-dir=build/gpu -C cmake.define.HQ_CUDA=ON .
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(GPU_SITE):$(PYTHONPATH) $(PYTHON) -m pytest -q -m gpu -p no:cacheprovider \
	  tests/csrc tests/ops tests/nn tests/train tests/test_gemm.py
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(GPU_SITE):$(PYTHONPATH) $(PYTHON) -m hqsweep run conf=parity parity.device=cuda track=none --force

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core pybind11 cmake ninja
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/python -c "from hqsweep import _C; print('hqsweep: CUDA kernels', \
	  'compiled' if _C.build_info()['cuda'] else 'skipped, nvcc not found')"
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find hqsweep tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(STAMP)
