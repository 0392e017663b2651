# `make` alone lists the targets. Everything runs in .venv, which is made on first use.

PYTHON ?= python3
VENV ?= .venv
# The interpreter of `make gpu`, with its own torch and Lightning.
GPU_PYTHON ?= python3
# The folder of measurements, and the time limit of `make gpu` in seconds.
OUT ?= benchmarks/results
GPU_BUDGET ?= 570

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Without the constraints torch would be the newest, with gigabytes of CUDA. The first call updates pip,
# since `--group` needs a newer one than Python brings.
PIP := $(BIN)/python -m pip install -qq -c constraints.txt
# One thread per process: tests run side by side, and timings must be comparable.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# One more worker of pytest than cores, up to 9: some tests wait for their processes. pytest's
# bytecode is kept, so that workers do not compile the tests again.
WORKERS ?= $(shell expr 1 + $$(getconf _NPROCESSORS_ONLN))
PYTEST := $(ONE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist worksteal
BENCHMARKS = $(subst /,.,$(basename $(filter-out benchmarks/gpu.py,$(shell grep -rl --include='*.py' '__main__' benchmarks))))

.DEFAULT_GOAL := help
.PHONY: help demo quick test lint types imports docs pages matrix clients compat cuda-dry notebooks bench gpu format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"The versions in constraints.txt need Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.12 ...")'
	@echo 'Installing into $(VENV): a minute or two, and only when pyproject.toml or constraints.txt changed.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) pip hatchling
	@$(PIP) --no-build-isolation -e '.[all]' --group dev
	@touch $@

demo: $(INSTALLED) ## four failures and limits, with and without lightning_opt, in three minutes; ACT=2 runs one
	$(BIN)/python examples/demo.py $(addprefix --act ,$(ACT))

quick: $(INSTALLED) ## tests that neither train nor start a process, in one minute
	$(PYTEST) -n logical --maxprocesses 4 --quick

# The second pass leaves out the settings of clipping rules, which use torch alone.
test: $(INSTALLED) ## all tests and the doctests of the package, some of them with pytorch_lightning too
	$(PYTEST) -n $(WORKERS) --maxprocesses 9
	LIGHTNING=pytorch_lightning $(PYTEST) -n logical --maxprocesses 9 -m 'not settings' -k 'resumes or unchanged or ddp' tests/test_contracts.py 'tests/test_matrix.py::test_cells_are_as_recorded[ddp]'

lint: $(INSTALLED) ## ruff (rules and format), and no editor metadata in notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find examples -name '*.ipynb' -not -path '*/.*' -exec $(BIN)/nbstripout --keep-output --keep-id --verify {} +

types: $(INSTALLED) ## mypy: the package strictly, and names and arguments in benchmarks
	$(BIN)/mypy

imports: $(INSTALLED) ## import-linter: the allowed imports between packages
	$(BIN)/lint-imports

docs: $(INSTALLED) ## build the documentation into docs/_build/html, and run its examples
	$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html
	$(BIN)/sphinx-build -q -n -W --keep-going -b doctest docs docs/_build/doctest

pages: $(INSTALLED) ## write the parts of the documentation that are generated from code and records
	$(BIN)/python docs/pages.py

matrix: $(INSTALLED) ## run all cells of the compatibility matrix and of the zoo, and write both into docs
	$(ONE_THREAD) $(BIN)/python -m tests.matrix
	$(ONE_THREAD) $(BIN)/python -m tests.zoo
	$(BIN)/python docs/pages.py

clients: ## train in projects of others with every feature; their packages go into build/clients
	$(MAKE) --no-print-directory VENV=build/clients build/clients/.installed
	build/clients/bin/python -m pip install -qq -c constraints.txt --group clients
	$(ONE_THREAD) build/clients/bin/python -m tests.clients

compat: $(INSTALLED) ## a part of the tests with the oldest and newest torch and Lightning
	$(BIN)/python tests/compat.py $(PAIRS)

cuda-dry: $(INSTALLED) ## tests on fake CUDA tensors with torch's CUDA build, without a GPU; 5 GB, removed afterwards
	$(BIN)/python tests/compat.py --cuda $(PAIRS)

notebooks: $(INSTALLED) ## run the notebooks and save their outputs, in five minutes
	$(ONE_THREAD) $(BIN)/python examples/run_notebooks.py

bench: $(INSTALLED) ## run every benchmark, and write tables and JSON into OUT
	for module in $(BENCHMARKS); do $(ONE_THREAD) $(BIN)/python -m $$module --out '$(OUT)' || exit 1; done

gpu: ## run GPU tests and benchmarks into OUT, without network
	$(GPU_PYTHON) benchmarks/gpu.py --budget $(GPU_BUDGET) --out '$(OUT)'

format: $(INSTALLED) ## fix and format sources and notebooks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find examples -name '*.ipynb' -not -path '*/.*' -exec $(BIN)/nbstripout --keep-output --keep-id {} +

lock: ## write the newest versions that pyproject.toml allows into constraints.txt (torch stays)
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	grep -E '^(#|torch==|pip==)' constraints.txt > build/pins.txt
	build/lock/bin/python -m pip install -qq -c build/pins.txt pip hatchling
	build/lock/bin/python -m pip install -qq -c build/pins.txt --no-build-isolation -e '.[all]' --group dev
	{ grep '^#' constraints.txt; build/lock/bin/python -m pip freeze --all --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist docs/_build docs/_generated .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
