# `make run` installs and runs the main job; `make test` installs and runs the tests. Both make their own environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= out/tiny
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test test-oldest test-gpu lint real train-tiny clean

run: $(VENV)/.run
	$(BIN)/latent-santa ruler --model builtin:tiny --out $(OUT) --resume

test: $(VENV)/.test
	$(BIN)/python -m pytest

# the oldest transformers that is supported
test-oldest: .venv-oldest/.test
	.venv-oldest/bin/python -m pytest

# needs a CUDA device and its own PyTorch; uses the python that is given
test-gpu:
	$(PYTHON) -m pytest tests/gpu -m gpu

lint: $(VENV)/.test
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/mypy

# real checkpoints: make real MLA=PATH GQA=PATH
real: $(VENV)/.run
	@test -n "$(MLA)$(GQA)" || { echo "give MLA=PATH, GQA=PATH or both: checkpoints of the two kinds"; exit 2; }
	for model in $(MLA) $(GQA); do \
	  $(BIN)/latent-santa check --model $$model && \
	  $(BIN)/latent-santa compare --model $$model --length 2304 --max-new-tokens 40 --budgets 128,512 --estimator per_head,pooled || exit 1; \
	done

# needs one CUDA device; uses the python that is given
train-tiny:
	$(PYTHON) -m latent_santa.eval.tiny.train --resume

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[eval]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[eval,test]'
	touch $@

.venv-oldest/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v -e '^transformers==' -e '^huggingface_hub==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt \
	  transformers==5.17.0 --editable '.[eval,test]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
