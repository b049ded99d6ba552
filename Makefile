# Every target sets up what it needs in .venv, from a clean clone, with the versions pinned in
# constraints.txt. A second call reuses it; an edited pyproject.toml or constraints.txt renews it.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
CODE := $(wildcard src tests benchmarks examples docs)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pip processes must not write to one environment
.PHONY: help demo test test-gpu lint format bench docs clean

help: ## Show this text
	@echo "krylov-descent: second-order training for PyTorch. Usage: make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-lab ## Train a small autoencoder with five optimisers; ends with a report
	@rm -rf demo
	@$(VENV)/bin/ksd compare curves --small --seconds 15 --folder demo

# A process for each core, with one thread: most tests are too small for more. What a file sets up for
# its tests is set up once, so each file is for one process.
test: $(VENV)/.installed-dev ## Run the tests (those that need a GPU are skipped by name)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -rsfE --no-fold-skipped \
	  -n auto --dist loadfile

# GPU machines often allow no installation: an interpreter that already sees a GPU is used as it is.
# Only files with GPU tests of their own, or over all engines, are collected, so that the imports of
# others need not be there.
SEES_GPU := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
test-gpu: ## Run the tests that need a GPU, with PYTHON itself where its torch sees one
	@python="$(PYTHON)"; \
	if ! $$python $(SEES_GPU); then \
	  if ! nvidia-smi -L >/dev/null 2>&1; then \
	    echo "make test-gpu: no GPU here. Run it where there is one; if there is, name an" \
	      "interpreter whose torch sees it: make test-gpu PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  $(MAKE) --no-print-directory $(VENV)/.installed-dev && python=$(VENV)/bin/python || exit 1; \
	  if ! $$python $(SEES_GPU); then \
	    echo "make test-gpu: there is a GPU, but the torch in $(VENV) cannot use it. Name an" \
	      "interpreter whose torch can: make test-gpu PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	fi; \
	files=$$(grep -rlE --include='test_*.py' '^[^#]*(mark\.gpu|from tests\.engines )' tests) || \
	  { echo "make test-gpu: no test is marked with pytest.mark.gpu" >&2; exit 1; }; \
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $$python -m pytest -q -rsfE -m gpu $$files

lint: $(VENV)/.installed-dev ## Check style, formatting and types
	@$(VENV)/bin/ruff check $(CODE)
	@$(VENV)/bin/ruff format --check $(CODE)
	@$(VENV)/bin/mypy $(CODE)

format: $(VENV)/.installed-dev ## Format the code and repair what ruff can repair
	@$(VENV)/bin/ruff check --fix $(CODE)
	@$(VENV)/bin/ruff format $(CODE)

bench: $(VENV)/.installed-bench ## Measure against other libraries; writes docs/benchmarks.md, too
	@$(VENV)/bin/python -m benchmarks

docs: $(VENV)/.installed-docs ## Build the site into site/ (a broken link or anchor fails the build)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "The site is built: open site/index.html"

clean: ## Remove .venv, caches and everything built
	rm -rf $(VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "krylov-descent needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo 'not there'). Name another:" \
	    "make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module: install it (Debian and Ubuntu: apt install" \
	    "python3-venv), or name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# One stamp per extra. The build backend is installed first and used without isolation, so that it
# too has the pinned version.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing krylov-descent[$*] into $(VENV) (a minute or two the first time)"
	@$(PIP) install -c constraints.txt hatchling hatch-fancy-pypi-readme editables
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@
