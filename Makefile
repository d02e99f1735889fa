# Targets for developers and CI. ARGS passes options on: make train ARGS="pool=median"
PYTHON ?= python3
ARGS ?=

# $(PYTHON) is used if it has the package (for tests: the test tools); else .venv is created.
has = $(shell $(PYTHON) -c "from importlib.metadata import version as v; [v(n) for n in '$(1)'.split()]" >/dev/null 2>&1 && echo yes)

ifeq ($(call has,unet3d-lightning),yes)
RUN := $(PYTHON)
else
RUN := .venv/bin/python
TRAIN_NEEDS := .venv/train
endif

ifeq ($(call has,unet3d-lightning pytest pytest-xdist hypothesis import-linter ruff ty hatchling mkdocs-material onnx onnxscript onnxruntime openvino nnunetv2 einops wandb mlflow optuna SimpleITK tifffile imagecodecs zarr h5py blosc2 pydicom highdicom safetensors huggingface_hub fire pytorch-ignite nbclient ipykernel ipyniivue),yes)
TEST := $(PYTHON)
else
TEST := .venv/bin/python
TEST_NEEDS := .venv/test
endif

# One process per core; the slowest tests are listed at the end.
PYTEST := -m pytest -n auto --dist worksteal --durations=25

.PHONY: train test check format lint types layers docs gpu long clean

train: $(TRAIN_NEEDS)
	$(RUN) train.py $(ARGS)

TESTS = not gpu and not slow and not long
test: $(TEST_NEEDS)
	$(TEST) $(PYTEST) -m "$(TESTS)" $(ARGS)

# What CI runs: `make test` with the slow tests, and everything that needs no run.
check: TESTS = not gpu and not long
check: lint types layers docs test

lint: $(TEST_NEEDS)
	$(TEST) -m ruff format --check .
	$(TEST) -m ruff check .

types: $(TEST_NEEDS)
	$(TEST) -m ty check --python $(TEST)

layers: $(TEST_NEEDS)
	$(TEST) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache

# The site, into site/; a dead link, a missing anchor or a page outside the navigation is an error.
docs: $(TEST_NEEDS)
	NO_MKDOCS_2_WARNING=1 $(TEST) -m mkdocs build --strict --quiet

# Tests marked `long`, and runs that are killed and stopped again and again: ten minutes.
long: $(TEST_NEEDS)
	$(TEST) $(PYTEST) -m long
	$(TEST) -m scripts.chaos

gpu: $(TEST_NEEDS)
	$(TEST) -m scripts.gpu.report $(ARGS)

format: $(TEST_NEEDS)
	$(TEST) -m ruff format .
	$(TEST) -m ruff check --fix .

clean:
	rm -rf .venv dist build site

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install -e .
	touch $@

# An installed torch is kept; torchvision, which the peers require, would install the newest one. A
# torchvision that does not work with that torch (one built for CUDA) is removed: no test needs it.
.venv/test: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip list --format=freeze | grep '^torch==' > .venv/torch.txt || true
	.venv/bin/python -m pip install -e ".[test,peers]" -c .venv/torch.txt
	.venv/bin/python -c "import torchvision" 2>/dev/null || .venv/bin/python -m pip uninstall -y torchvision
	touch $@ .venv/train
