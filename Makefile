# `make demo` and `make test` work on a fresh clone with nothing but Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
# Exact versions of all packages.
CONSTRAINTS ?= constraints.txt
# Arguments of pytest.
TESTS ?=

# A version of torch for `make test-newest` and `make test-cuda`: TORCH=2.13.0, or TORCH='torch==2.13.0'.
TORCH ?= torch
# Environment of the newest packages.
NEWEST := .venv-newest
NEWEST_TORCH := $(if $(filter torch%,$(TORCH)),$(TORCH),torch==$(TORCH))
NEWEST_TESTS ?= tests/cli tests/analysis tests/machines tests/interleave/model tests/features/advise \
	tests/interleave/simulation tests/features/importers tests/profiler/trace

# Environments and files of the programs of training frameworks.
RECIPES := .recipes

# Environment of a CUDA build of torch, one for each version, whose tests run on a stand-in for the CUDA runtime.
CUDA_TORCH := $(or $(subst =,,$(patsubst torch%,%,$(TORCH))),2.11.0)
CUDA := .venv-cuda/$(CUDA_TORCH)
# Files with tests that need a GPU or the stand-in; others may import what the environment lacks.
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) $(shell command -v python3.12) $(PYTHON))

# Multiplies the random cases of `make test-all`.
FUZZ ?= 4

.PHONY: coverage demo docs test test-all test-cuda test-newest test-recipes lint dist clean

$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("ebbtide needs Python 3.11 or newer: make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[all]'
	touch $@

$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test,docs]'
	touch $@

H100 := traces/h100-20b-blocking.ebb
A100 := traces/a100-13b-async.ebb

demo: $(VENV)/installed
	@rm -rf $(DEMO) && mkdir $(DEMO)
	@echo "== 1. A real job: 15 G parameters on 4 H100, optimizer state on the CPU (measured by others, traces/README.md)"
	$(BIN)/ebbtide summary $(H100)
	$(BIN)/ebbtide findings $(H100)
	$(BIN)/ebbtide windows $(H100) --min-bytes 40GiB
	$(BIN)/ebbtide plot $(H100) --iterations 4:7 -o $(DEMO)/h100.png
	$(BIN)/ebbtide report $(H100) -o $(DEMO)/h100.html
	$(BIN)/ebbtide replay $(H100) --machine h100-80gb-sxm-published --recommend
	@echo
	@echo "== 2. A job whose state does not fit: 11 G parameters on 4 A100 of 40 GB, replayed under each policy (simulated)"
	$(BIN)/ebbtide replay $(A100) --machine a100-40gb-published --recommend --plot $(DEMO)/a100-policies.png
	@echo
	@echo "== 3. A job on this machine: a small GPT, recorded while it trains"
	@$(BIN)/python -c 'import torch; print("GPU found:", torch.cuda.get_device_name()) if torch.cuda.is_available() else print("No GPU here: the GPT trains on the CPU.")'
	$(BIN)/ebbtide profile -o $(DEMO)/gpt.ebb -- $(BIN)/python examples/train_gpt.py --steps 12 --accumulate 2
	$(BIN)/ebbtide summary $(DEMO)/gpt.ebb
	$(BIN)/ebbtide plot $(DEMO)/gpt.ebb --iterations 3:8 -o $(DEMO)/gpt.png
	$(BIN)/ebbtide report $(DEMO)/gpt.ebb -o $(DEMO)/gpt.html
	@echo
	@echo "== 4. A larger GPT on a GPU that is not here: predicted by a dry run, and the machine that it needs"
	$(BIN)/ebbtide dry-run --gpu h100-80gb -o $(DEMO)/predicted.ebb -- $(BIN)/python examples/train_gpt.py --layers 24 --width 2048 --heads 16 --context 1024 --dtype bfloat16
	$(BIN)/ebbtide summary $(DEMO)/predicted.ebb
	$(BIN)/ebbtide plot $(DEMO)/predicted.ebb -o $(DEMO)/predicted.png
	$(BIN)/ebbtide plan $(DEMO)/predicted.ebb --machine rtx4090 a100-40gb-pcie h100-80gb --plot $(DEMO)/machines.png
	@echo
	@echo "== 5. A script that knows nothing of ebbtide, under three policies on this machine: measured beside predicted, losses equal to the bit"
	$(BIN)/ebbtide compare --steps 8 --plot $(DEMO)/compare.png -- $(BIN)/python examples/train_plain.py
	@echo
	@echo "Open $(DEMO)/h100.html first, then $(DEMO)/a100-policies.png, $(DEMO)/gpt.html, $(DEMO)/predicted.png, $(DEMO)/machines.png and $(DEMO)/compare.png."
	@echo "To record your own job: $(BIN)/ebbtide profile -o run.ebb -- $(BIN)/python train.py"

$(VENV)/documented: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The variable silences an advertisement that mkdocs-material prints.
docs: $(VENV)/documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html, or with search: $(BIN)/python -m http.server -d site"

lint: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# DeepSpeed's C++ extensions, which the tests would compile otherwise when they first need them.
$(VENV)/compiled: $(VENV)/tested tests/torch_extensions.py
	$(BIN)/python -m tests.torch_extensions
	touch $@

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

# One process of `lint` beside two of the tests; its output comes in one piece when it ends.
define test_and_lint
	$(info $(1))
	@(output=$$($(MAKE) --no-print-directory lint 2>&1); status=$$?; printf '\n%s\n' "$$output"; exit $$status) & \
	$(1); tests=$$?; wait $$! || { echo 'lint has failed: its output is among that of the tests'; exit 1; }; exit $$tests
endef

test: $(VENV)/compiled
	$(call test_and_lint,$(PYTEST) -m "not slow" $(TESTS))

test-all: $(VENV)/compiled
	$(call test_and_lint,EBBTIDE_FUZZ=$(FUZZ) $(PYTEST) --timeout 1200 $(TESTS))

# Lines of the product that the tests run, also in processes that they start.
coverage: $(VENV)/compiled
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pytest-cov
	$(PYTEST) -p pytest_cov --cov=ebbtide --cov-report=json:coverage.json -m "not slow" $(TESTS)
	$(BIN)/python tests/coverage_table.py coverage.json

# `==` would take a build for the CPU. It is 4.6 GB: only another version is installed again.
$(CUDA)/torch:
	$(PYTHON312) -m venv --clear $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet 'torch===$(CUDA_TORCH)'
	touch $@

$(CUDA)/installed: pyproject.toml $(CONSTRAINTS) | $(CUDA)/torch
	$(CUDA)/bin/python -m pip install --quiet --editable '.[calibrate,live,report]' pytest pytest-timeout pytest-xdist hypothesis \
		"$$(grep '^deepspeed==' $(CONSTRAINTS))"
	touch $@

# Files of the second line have recordings that all of their tests read.
test-cuda: $(CUDA)/installed
	$(CUDA)/bin/python -m pytest -q -n 2 --dist worksteal --timeout 600 tests/cuda_runtime
	$(CUDA)/bin/python -m tests.cuda_runtime -m pytest -q -n 2 --dist loadfile --timeout 600 -m 'gpu and not real_gpu' $(GPU_TESTS)

# The tests of the commands with the newest version of every package. Dry runs know the layout of the pinned torch alone.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager '$(NEWEST_TORCH)' --editable '.[test]'
	$(NEWEST)/bin/python -m pip list
	$(NEWEST)/bin/python -m tests.torch_extensions
	$(NEWEST)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" --ignore-glob='*dry*run*' $(NEWEST_TESTS)

# Programs of training frameworks in dry runs. All packages are listed, so that nothing is resolved; an environment has those
# of `main`, and its own in place of them.
# Builds for the CPU are the smaller ones.
$(RECIPES)/%/installed: export PIP_EXTRA_INDEX_URL ?= https://download.pytorch.org/whl/cpu
# GPTQModel is built beside the torch that is installed, without its kernels (a 0 here turns isolation off).
$(RECIPES)/gptq/installed: BUILD := BUILD_CUDA_EXT=0 PIP_NO_BUILD_ISOLATION=0
$(RECIPES)/%/installed: tests/recipes/requirements-%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement tests/recipes/requirements-main.txt
	$(BUILD) $(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(@D)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-recipes: $(patsubst tests/recipes/requirements-%.txt,$(RECIPES)/%/installed,$(wildcard tests/recipes/requirements-*.txt))
	$(RECIPES)/main/bin/python -m tests.recipes.run $(RECIPES)/hub --environments $(RECIPES) --page docs/dry-run-recipes.md
	$(RECIPES)/main/bin/python -m tests.recipes.record_megatron $(RECIPES)

# The source distribution and the wheel of a release, after the tests of both.
dist: $(VENV)/tested
	$(BIN)/python -m pytest -q tests/test_distribution.py
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) .venv-cuda $(NEWEST) $(RECIPES) $(DEMO) .editable build site dist *.egg-info
