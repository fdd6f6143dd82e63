.PHONY: environment test nightly lint demo clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

environment: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing, or older than Python 3.11: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "fix: install Python 3.11 or newer, and name it: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make environments: a part of Python is missing" >&2; \
	  echo "fix: on Debian and Ubuntu: sudo apt install python3-venv" >&2; \
	  exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# One after the other, whatever is red: which of them are, it says at its end.
SEEDS := $(BIN)/python -m p2p_dtfm.testbed.virtual.seeds --jobs 2 --shrink --seeds
NIGHTLY_PARTS := \
  "env NIGHTLY=1 $(BIN)/python -m pytest -r fEs --numprocesses 2 --dist loadfile --no-loadscope-reorder" \
  "$(BIN)/python -m p2p_dtfm.sim.faults.agreement_seeds --seeds 0-9999 --jobs 2" \
  "$(SEEDS) 0-199" \
  "$(SEEDS) 100000-100049" \
  "$(SEEDS) 200000-200199" \
  "$(SEEDS) 300000-300099" \
  "$(SEEDS) 400000-400099" \
  "$(SEEDS) 500000-509999" \
  "$(SEEDS) 600000-600199" \
  "$(SEEDS) 700000-700499" \
  "$(SEEDS) 800000-800499" \
  "$(SEEDS) 900000-900199" \
  "$(SEEDS) 930000-930199" \
  "$(SEEDS) 935000-935099" \
  "$(SEEDS) 940000-940099" \
  "$(SEEDS) 950000-950099" \
  "$(SEEDS) 960000-960019" \
  "$(SEEDS) 970000-970199" \
  "$(SEEDS) 980000-980049" \
  "$(SEEDS) 990000-990049"

nightly: lint
	@red=; for part in $(NIGHTLY_PARTS); do \
	  echo "$$part"; \
	  $$part || red="$$red\n  $$part"; \
	done; \
	if [ -n "$$red" ]; then printf "red is, as told above:$$red\n"; exit 1; fi; \
	echo "nothing is red"

demo: environment
	$(BIN)/p2p-dtfm demo

clean:
	rm -rf $(VENV)
