# `make` alone lists the targets. Everything runs in .venv, which is made on first use.

PYTHON ?= python3
VENV ?= .venv
# `make gpu` uses this interpreter as it is, with the torch and Lightning that it has.
GPU_PYTHON ?= python3
# Where measurements are written, and the seconds that `make gpu` may take: under ten minutes.
OUT ?= benchmarks/results
GPU_BUDGET ?= 570

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Every call reads the constraints: without them torch would be the newest, with gigabytes of CUDA.
# The first installs pip itself, since `--group` needs a newer one than Python brings.
PIP := $(BIN)/python -m pip install -qq -c constraints.txt
# One thread a process: tests and benchmarks run side by side, and timings must not depend on luck.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Workers of pytest, one more than cores: some test always waits for its processes. What pytest makes
# of the sources is kept, or each worker would make it anew each time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(ONE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist worksteal
BENCHMARKS = $(subst /,.,$(basename $(filter-out benchmarks/gpu.py,$(shell grep -rl --include='*.py' '__main__' benchmarks))))

.DEFAULT_GOAL := help
.PHONY: help demo quick test lint types imports docs pages matrix compat cuda-dry notebooks bench gpu format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"The versions in constraints.txt need Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.12 ...")'
	@echo 'Installing into $(VENV): a minute or two, and only when pyproject.toml or constraints.txt changed.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) pip hatchling
	@$(PIP) --no-build-isolation -e '.[all]' --group dev
	@touch $@

demo: $(INSTALLED) ## four failures and limits, each plain beside ours, in three minutes; ACT=2 plays one
	$(BIN)/python examples/demo.py $(addprefix --act ,$(ACT))

quick: $(INSTALLED) ## within a minute: what neither trains nor starts a process
	$(PYTEST) -n logical --maxprocesses 4 --quick

test: $(INSTALLED) ## every test, slow ones too, and the doctests of the package
	$(PYTEST) -n $(WORKERS) --maxprocesses 9

lint: $(INSTALLED) ## ruff (rules and format), notebooks without metadata of editors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find examples -name '*.ipynb' -not -path '*/.*' -exec $(BIN)/nbstripout --keep-output --keep-id --verify {} +

types: $(INSTALLED) ## mypy, strict, on the package
	$(BIN)/mypy

imports: $(INSTALLED) ## import-linter: which package may import which
	$(BIN)/lint-imports

docs: $(INSTALLED) ## the documentation into docs/_build/html, and its examples run
	$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html
	$(BIN)/sphinx-build -q -n -W --keep-going -b doctest docs docs/_build/doctest

pages: $(INSTALLED) ## write the parts of the documentation that are made from code and records
	$(BIN)/python docs/pages.py

matrix: $(INSTALLED) ## run every cell of the compatibility matrix and of the zoo, and write both into docs
	$(ONE_THREAD) $(BIN)/python -m tests.matrix
	$(ONE_THREAD) $(BIN)/python -m tests.zoo
	$(BIN)/python docs/pages.py

compat: $(INSTALLED) ## with the oldest and newest torch and Lightning: quick tests, and those that train most features
	$(BIN)/python tests/compat.py $(PAIRS)

cuda-dry: $(INSTALLED) ## fake CUDA with torch's CUDA build, no GPU needed: 5 GB, removed afterwards
	$(BIN)/python tests/compat.py --cuda $(PAIRS)

notebooks: $(INSTALLED) ## run the notebooks and keep their outputs, in five minutes
	$(ONE_THREAD) $(BIN)/python examples/run_notebooks.py

bench: $(INSTALLED) ## every benchmark on this machine, tables and JSON into OUT
	for module in $(BENCHMARKS); do $(ONE_THREAD) $(BIN)/python -m $$module --out '$(OUT)' || exit 1; done

gpu: ## on a machine with a GPU, no network needed: GPU tests and benchmarks into OUT
	$(GPU_PYTHON) benchmarks/gpu.py --budget $(GPU_BUDGET) --out '$(OUT)'

format: $(INSTALLED) ## let ruff mend and format the sources, and tidy the notebooks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find examples -name '*.ipynb' -not -path '*/.*' -exec $(BIN)/nbstripout --keep-output --keep-id {} +

lock: ## take the newest versions that fit pyproject.toml into constraints.txt (torch stays)
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	grep -E '^(#|torch==|pip==)' constraints.txt > build/pins.txt
	build/lock/bin/python -m pip install -qq -c build/pins.txt pip hatchling
	build/lock/bin/python -m pip install -qq -c build/pins.txt --no-build-isolation -e '.[all]' --group dev
	{ grep '^#' constraints.txt; build/lock/bin/python -m pip freeze --all --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove the environment, caches and everything built
	rm -rf $(VENV) build dist docs/_build docs/_generated .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
