# `make demo` and `make test` need python3 (3.10 to 3.13), pip and make; the first call makes .venv and installs into it.

SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
SLOW   := $(VENV)/.tools-slow
FLOWER := $(VENV)/.flower
TORCH  := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' constraints.txt)
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Test processes side by side, each with one numerical thread: one more than cores, since some wait for children.
WORKERS ?= 3
# Tests write, sync and remove thousands of small files. In memory that takes no time, so they go there if it has room.
ROOMY  := $(shell grep -s ' /dev/shm ' /proc/mounts | grep -qv noexec && df -Pk /dev/shm | awk 'NR > 1 && $$4 > 4e6 {print $$6}')
FILES  := $(if $(TMPDIR),,$(ROOMY))
# Bytecode spares each process of a test the compiler.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(addprefix TMPDIR=,$(FILES)) \
          $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -o tmp_path_retention_policy=failed

SPHINX := $(BIN)/sphinx-build -q --keep-going -j auto -d build/doctrees

.DEFAULT_GOAL := help
.PHONY: help install demo demo-federated test test-slow test-bench mutants coverage lint style docs docs-links bench bench-scale assurance results stats picture clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

install: $(TOOLS) ## make .venv and install the package with its tools (once)

demo: $(STAMP) ## train with and without the preconditioner on real digits
	$(BIN)/dpkfc demo

demo-federated: $(FLOWER) ## ten clients and a server, in one process and on Flower
	$(BIN)/dpkfc demo-federated

# mypy runs beside the tests and has the last word.
test: style ## lint, types and the quick tests
	@mkdir -p build
	@$(BIN)/mypy > build/mypy.txt & types=$$!; $(PYTEST) -m "not slow and not bench"; \
	tests=$$?; wait $$types; types=$$?; cat build/mypy.txt; exit $$((tests | types))

test-slow: $(SLOW) ## the other tests: site, notebooks, Flower with Ray, browser, wheel, full sizes
	$(PYTEST) -rs -m "slow and not bench"

test-bench: $(TOOLS) ## the benchmarks themselves, at a small size
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m bench

mutants: $(SLOW) ## plant small faults in the source, and see which tests notice (hours)
	$(BIN)/python benchmarks/mutants.py --record
	$(BIN)/python benchmarks/mutants.py

coverage: $(SLOW) ## lines and branches of the source that all tests reach in their own processes
	@mkdir -p build
	$(PYTEST) -m "not bench" --cov --cov-report=term

lint: style ## ruff and mypy
	$(BIN)/mypy

style: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(SLOW) ## the site, in build/site: notebooks are executed, a warning is an error, no network
	OMP_NUM_THREADS=1 $(SPHINX) -W -b html docs build/site

docs-links: $(SLOW) ## whether links to other sites still lead somewhere (needs a network)
	DPKFC_DOCS_NOTEBOOKS=off $(SPHINX) -b linkcheck docs build/links

bench: $(TOOLS) ## time a step against plain SGD and Opacus, and that of each method, then refresh the tables
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/method_speed.py
	$(BIN)/python benchmarks/method_speed.py --views
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/tables.py

bench-scale: $(TOOLS) ## how a step grows with width, depth, batch, positions and rank, and on two processes, then refresh the tables
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/scale_ranks.py
	$(BIN)/python benchmarks/tables.py

assurance: $(TOOLS) ## every check of the privacy promise at full size, then refresh the tables (up to 45 minutes)
	$(BIN)/python benchmarks/assurance.py
	$(BIN)/python benchmarks/tables.py

results: $(TOOLS) ## refresh the tables in README.md and docs, and their pictures, from results of benchmarks and papers
	$(BIN)/python -m dpkfc_papers.studies.pages
	$(BIN)/python benchmarks/tables.py

stats: $(TOOLS) ## files and tokens of the source, words of the documents
	$(BIN)/python benchmarks/stats.py

picture: $(STAMP) ## run the demo and put its comparison into the README
	rm -rf runs/picture
	$(BIN)/dpkfc demo --out runs/picture
	cp runs/picture/comparison.png docs/img/demo.png

clean: ## remove .venv, caches and build leftovers (never runs/)
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship python3 without ensurepip: then pip is put into the new environment by the pip that is there.
# torch goes first and alone, in exactly this spelling, so that nothing else can choose another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else \
	    f"dpkfc needs Python 3.10 to 3.13, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	    { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP) install "$(TORCH)"
	$(PIP) install -c constraints.txt -e ".[demo]" -e papers -e verifier
	@touch $@

# Flower and Ray, which only the federated demo needs.
$(FLOWER): $(STAMP)
	$(PIP) install -c constraints.txt -e ".[demo,federated]" -e papers -e verifier
	@touch $@

# What only tests and benchmarks need (peers, transformers, checkers) comes on top, so that the demo need not wait for it.
$(TOOLS): $(STAMP)
	$(PIP) install -c constraints.txt -e ".[dev,demo]" -e papers -e verifier
	@touch $@

# What only slow tests and the site need: Ray, Sphinx and Jupyter, a browser's driver, a sentence encoder.
$(SLOW): $(TOOLS)
	$(PIP) install -c constraints.txt -e ".[dev-slow,demo]" -e papers -e verifier
	@touch $@
