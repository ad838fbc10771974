# Headrace: `make demo` to see it work, `make test` to prove it.
PYTHON ?= python3
VENV   ?= .venv
TOKENS ?= 10000000
BIN    := $(VENV)/bin
SANITIZERS := run-sanitize-address run-sanitize-thread
LIBRARY := kernels/cpu/headrace_cpu.so
COMPILER := $(shell command -v $(CXX))
# A library that couldn't be built when Headrace was installed is built as soon as there is a compiler.
UNBUILT := $(if $(wildcard $(LIBRARY)),,$(if $(COMPILER),unbuilt))
INPUTS := constraints.txt pyproject.toml client/pyproject.toml setup.py $(wildcard kernels/cpu/src/*)
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e client

.DEFAULT_GOAL := help
.PHONY: unbuilt help demo install test faults soak quick check gpu-check-offline audit lint-fix bench-peers bench long-run sanitize $(SANITIZERS) redis-server

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.served ## Install, start everything embedded, run 16 jobs, stop
	$(BIN)/headrace demo

install: $(VENV)/.tested ## Install what serving and testing need into .venv

test: check redis-server ## The checks, then the whole suite, and again on Redis and PostgreSQL what touches them
	$(BIN)/python -m tests.lanes

faults: $(VENV)/.tested redis-server ## Every fault at every point of a job's life, on both brokers and both databases
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/faults
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/faults --database postgres --broker redis

MINUTES ?= 5
SEED ?= 1
SOAK = $(BIN)/python -m tests.faults.soak --seed $(SEED)

soak: $(VENV)/.tested ## Faults of every kind under load, for MINUTES; or JOBS=1000 under a kill every second, on both databases
ifdef JOBS
	$(SOAK) --minutes 60 --jobs $(JOBS) --faults kill --database sqlite
	$(SOAK) --minutes 60 --jobs $(JOBS) --faults kill --database postgres
else
	$(SOAK) --minutes $(MINUTES) --report soak.json
endif

quick: $(VENV)/.tested ## The suite without its slow tests
	$(BIN)/python -m pytest -q -m "not slow"

check: $(VENV)/.tested ## Format, lint, types and import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu-check-offline: $(VENV)/.tested ## Compile every Triton kernel for four GPUs that needn't be here, and print what each takes
	$(BIN)/python -m kernels.triton.checks

audit: $(VENV)/.audited ## Known vulnerabilities of the pinned dependencies; says so if nobody can be asked
	.ci/audit $(BIN)/python

lint-fix: $(VENV)/.tested ## Format, and repair what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-peers: $(VENV)/.tested ## Install vLLM and build llama.cpp into .bench, to be measured against
	$(BIN)/python -m bench.peers

bench: $(VENV)/.tested ## Headrace beside what people run today; writes bench/RESULTS.md
	$(BIN)/python bench/engine.py

long-run: $(VENV)/.tested ## Ten million tokens (TOKENS=...) through the engine, whose memory must not grow
	$(BIN)/python -m bench.endurance --tokens $(TOKENS)

sanitize: $(SANITIZERS) ## The CPU library's C++ under the address, undefined-behaviour and thread sanitizers

$(SANITIZERS): run-sanitize-%: build/sanitize-%
	$<

NATIVE := $(wildcard kernels/cpu/src/*.cpp tests/native/*.cpp)
NATIVE_HEADERS := $(wildcard kernels/cpu/src/*.h tests/native/*.h)
# Without optimisation and with line numbers only: that builds in a third of the time, and the sanitizers see no less.
SANITIZED = $(CXX) -std=c++17 -O0 -g1 -ffp-contract=off -fno-omit-frame-pointer -pthread -Ikernels/cpu/src -fno-sanitize-recover=all

build/sanitize-address: $(NATIVE:%.cpp=build/address/%.o)
	$(SANITIZED) -fsanitize=address,undefined $^ -o $@

build/sanitize-thread: $(NATIVE:%.cpp=build/thread/%.o)
	$(SANITIZED) -fsanitize=thread $^ -o $@

build/address/%.o: %.cpp $(NATIVE_HEADERS)
	@mkdir -p $(@D)
	$(SANITIZED) -fsanitize=address,undefined -c $< -o $@

build/thread/%.o: %.cpp $(NATIVE_HEADERS)
	@mkdir -p $(@D)
	$(SANITIZED) -fsanitize=thread -c $< -o $@

unbuilt:
	@echo "Building the CPU library, which isn't there: $(LIBRARY)"

redis-server:
	@command -v redis-server >/dev/null || { \
	  echo "make test needs redis-server: install it with 'apt-get install redis-server' (or 'brew install redis')." >&2; \
	  exit 1; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Headrace needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." >&2; \
	  echo "Name another one: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.11" >&2; \
	  exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.served: $(INPUTS) $(UNBUILT) | $(BIN)/python
	@command -v nvidia-smi >/dev/null || echo "No NVIDIA GPU here; README.md, 'Without a GPU', says how to get the small build of PyTorch."
	$(if $(COMPILER),,@echo "No C++ compiler ($(CXX)) here: on a CPU torch will serve, several times slower. Install g++, and make builds the library.")
	@echo "Installing the pinned dependencies (a few minutes the first time)"
	@$(INSTALL) -e '.[embedded]'
	@touch $@

$(VENV)/.tested: $(INPUTS) $(UNBUILT) | $(BIN)/python
	@echo "Installing the pinned dependencies and the test tools (a few minutes the first time)"
	@$(INSTALL) -e '.[embedded,dev]'
	@touch $@ $(VENV)/.served

$(VENV)/.audited: $(INPUTS) | $(BIN)/python
	@$(INSTALL) -e '.[audit]' || echo "pip-audit can't be installed now" >&2
	@touch $@
