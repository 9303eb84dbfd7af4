# Accelerate for C++: the front door. `make help` says what there is.
SHELL := /bin/bash
# A pipe fails when any part of it does.
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PRESET ?= dev
TORCH  ?=
CUDA   ?=
PREFIX ?= /usr/local
LABELS ?= unit|multi
# ctest's -R: run a part of the tests, e.g. make test AREA=comm
AREA   ?=
FUZZ_SECONDS ?= 60
FUZZ_RUNS ?=
export TORCH CUDA JOBS

folder = build/$(1)$(if $(TORCH),-torch-$(TORCH))
# Two places per core: cmake/AccelerateTests.cmake says which test takes how many.
ctest  = ctest --test-dir $(call folder,$(1)) -j $$(($(shell nproc) * 2)) --output-on-failure --no-tests=error

.PHONY: setup build test demo interop bench bench-gpu bench-compare simulate fuzz asan tsan docs install format lint tidy clean help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: PRESET=dev|release|clang|asan|tsan|cpu-only|no-pch TORCH=2.15.0 CUDA=1 PREFIX=/usr/local AREA=comm JOBS=2"

setup:  ## install system packages and LibTorch (each target installs what it needs by itself)
	@tools/setup.sh

build: setup  ## build everything
	@tools/build.sh $(PRESET) $(call folder,$(PRESET))

test: build lint  ## build, then run the unit and multi-process tests
	@$(call ctest,$(PRESET)) -L '^($(LABELS))$$' $(if $(AREA),-R '$(AREA)')

demo:  ## two processes that learn to read digits together
	@tools/setup.sh --build
	@tools/build.sh $(PRESET) $(call folder,$(PRESET)) digits accelerate_cli
	@$(call folder,$(PRESET))/bin/accelerate launch --num_processes 2 $(call folder,$(PRESET))/examples/digits

interop: build  ## compare with Python Accelerate, live (fetches it: about 5 GB)
	@tools/build.sh $(PRESET) $(call folder,$(PRESET)) cpu_environment
	@ACCELERATE_PYTHON=$$(tools/setup.sh --python) && \
	  export ACCELERATE_PYTHON $$($(call folder,$(PRESET))/tools/cpu_environment) && \
	  $(call ctest,$(PRESET)) -L '^interop$$' $(if $(AREA),-R '$(AREA)')

bench: setup  ## measure ours, Python Accelerate and raw Gloo in one run (BENCH="collectives ddp": a part)
	@tools/build.sh release $(call folder,release) accelerate_benches cpu_environment
	@ACCELERATE_PYTHON=$$(tools/setup.sh --python) BENCH_FOLDER=$(call folder,release)/bench \
	  BENCH_JSON=$${BENCH_JSON:-$(call folder,release)/bench.json} \
	  env $$($(call folder,release)/tools/cpu_environment) bench/run.sh

bench-gpu: setup  ## the same on a GPU
	@tools/build.sh release $(call folder,release) accelerate_benches cpu_environment
	@ACCELERATE_PYTHON=$$(tools/setup.sh --python) BENCH_FOLDER=$(call folder,release)/bench \
	  BENCH_JSON=$${BENCH_JSON:-$(call folder,release)/bench-gpu.json} \
	  env $$($(call folder,release)/tools/cpu_environment) bench/run.sh gpu

bench-compare:  ## what became slower: make bench-compare A.json B.json
	@python3 bench/difference.py $(filter %.json,$(MAKECMDGOALS))

simulate:  ## what sharded training would send on 8 to 512 processes (SIMULATE="parameters=70e9 units=80")
	@tools/setup.sh --build
	@tools/build.sh $(PRESET) $(call folder,$(PRESET)) simulate_sharding
	@$(call folder,$(PRESET))/tools/simulate_sharding $(SIMULATE)

fuzz:  ## run every fuzz target for FUZZ_SECONDS, or FUZZ_RUNS times (Clang 16)
	@tools/setup.sh --build
	@FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_RUNS=$(FUZZ_RUNS) tools/fuzz.sh $(call folder,fuzz)

asan: setup  ## unit and multi tests under the address and undefined-behaviour sanitizers
	@tools/build.sh asan $(call folder,asan)
	@$(call ctest,asan) -L '^($(LABELS))$$' $(if $(AREA),-R '$(AREA)')

tsan: setup  ## the same under the thread sanitizer
	@tools/build.sh tsan $(call folder,tsan)
	@$(call ctest,tsan) -L '^($(LABELS))$$' $(if $(AREA),-R '$(AREA)')

docs:  ## the documentation site, in build/docs/site
	@tools/docs.sh

install:  ## build the release preset and install it to PREFIX
	@tools/setup.sh --build
	@tools/build.sh release $(call folder,release) accelerate_installed
	@cmake --install $(call folder,release) --prefix $(PREFIX) | tail -n 1

format:  ## format all sources
	@tools/lint.sh --format

lint:  ## check format, layers, lengths, type names, Markdown and guides; clang-tidy on changed files
	@tools/lint.sh

tidy:  ## clang-tidy on all sources (a minute per file that includes LibTorch)
	@tools/tidy.sh

clean:  ## remove what was built (LibTorch stays in the cache)
	@rm -rf build
