# The words that people and CI use. `make train ARGS="model=unet_small pool=median"` passes overrides on.
PYTHON ?= python3
ARGS ?=

# An environment that has the package (or the test tools) already is used as it is; else .venv is made.
has = $(shell $(PYTHON) -c "from importlib.metadata import version as v; [v(n) for n in '$(1)'.split()]" >/dev/null 2>&1 && echo yes)

ifeq ($(call has,unet3d),yes)
RUN := $(PYTHON)
else
RUN := .venv/bin/python
TRAIN_NEEDS := .venv/train
endif

ifeq ($(call has,unet3d pytest pytest-xdist hypothesis import-linter ruff ty hatchling onnx onnxscript onnxruntime nnunetv2),yes)
TEST := $(PYTHON)
else
TEST := .venv/bin/python
TEST_NEEDS := .venv/test
endif

.PHONY: train test check format lint types floors gpu chaos clean

train: $(TRAIN_NEEDS)
	$(RUN) train.py $(ARGS)

test: $(TEST_NEEDS)
	$(TEST) -m pytest -n auto --dist worksteal $(ARGS)

check: lint types floors test

lint: $(TEST_NEEDS)
	$(TEST) -m ruff format --check .
	$(TEST) -m ruff check .

types: $(TEST_NEEDS)
	$(TEST) -m ty check --python $(TEST)

floors: $(TEST_NEEDS)
	$(TEST) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache

chaos: $(TEST_NEEDS)
	$(TEST) scripts/chaos.py $(ARGS)

gpu: $(TEST_NEEDS)
	$(TEST) scripts/gpu_report.py $(ARGS)

format: $(TEST_NEEDS)
	$(TEST) -m ruff format .
	$(TEST) -m ruff check --fix .

clean:
	rm -rf .venv dist build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install -e .
	touch $@

# A torch that is installed stays: torchvision, which the peers ask for, would bring its newest. A
# torchvision that does not load beside it goes again: it is built for CUDA, and no test needs it.
.venv/test: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip list --format=freeze | grep '^torch==' > .venv/torch.txt || true
	.venv/bin/python -m pip install -e ".[test,peers]" -c .venv/torch.txt
	.venv/bin/python -c "import torchvision" 2>/dev/null || .venv/bin/python -m pip uninstall -y torchvision
	touch $@ .venv/train
