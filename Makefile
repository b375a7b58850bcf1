# `make demo` and `make test` work on a fresh clone with nothing but Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.PHONY: demo test test-all lint clean

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ebbtide needs Python 3.11 or newer: make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(VENV)/installed
	@rm -rf $(DEMO) && mkdir $(DEMO)
	@$(BIN)/python -c 'import torch; print("GPU found:", torch.cuda.get_device_name()) if torch.cuda.is_available() else print("No GPU here: the demo takes its default for that, a small GPT that trains on the CPU.")'
	$(BIN)/ebbtide profile -o $(DEMO)/gpt.ebb -- $(BIN)/python examples/train_gpt.py --steps 12 --accumulate 2
	$(BIN)/ebbtide summary $(DEMO)/gpt.ebb
	$(BIN)/ebbtide windows $(DEMO)/gpt.ebb --min-bytes 1GiB
	$(BIN)/ebbtide findings $(DEMO)/gpt.ebb
	$(BIN)/ebbtide plot $(DEMO)/gpt.ebb --iterations 3:8 -o $(DEMO)/memory.png
	$(BIN)/ebbtide report $(DEMO)/gpt.ebb -o $(DEMO)/report.html
	@echo
	@echo "Now a job whose optimizer state does not fit: 13 G parameters on four GPUs, replayed under each policy on a"
	@echo "machine that was fitted from published runs (simulated, not measured here)."
	$(BIN)/ebbtide replay --workload examples/workload-13b.json --machine a100-40gb-published --plot $(DEMO)/policies.png
	@echo
	@echo "And such policies run for real, on a small model: the same losses to the bit, and what was predicted of each."
	$(BIN)/ebbtide compare --params 5e6 --iterations 6 --plot $(DEMO)/compare.png
	@echo
	@echo "Look at $(DEMO)/report.html, $(DEMO)/policies.png and $(DEMO)/compare.png. Then record your own job:"
	@echo "  $(BIN)/ebbtide profile -o run.ebb -- $(BIN)/python train.py"

lint: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -q -n 2

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
