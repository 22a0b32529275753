# Needs python3 (or PYTHON=...) and nothing else. `make demo` is the place to start.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

SEED ?= 0
MINUTES ?= 5
SESSIONS ?= 500
BENCH ?=

.PHONY: demo test check docs coverage bench chaos chaos-20 network slow soak clean

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

# The modules without I/O, each of whose branches has a test.
PURE := codec messages merge protocol pool recycling actions links progress session statistics checkpoint
PURE_TESTS := codec messages merge protocol pool recycling state statistics progress

check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Into build/site. Whoever reads it fetches nothing from elsewhere.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	! grep -rnoE '<(script|link|img)[^>]+(src|href)="?https?:[^>]*>' build/site --include='*.html'

bench: $(VENV)/.installed-peers $(VENV)/.installed-examples
	$(BIN)/python benchmarks/bench.py --report benchmarks/report $(BENCH)

network: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m network

slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

coverage: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PURE_TESTS:%=tests/test_%.py) \
	    $(PURE:%=--cov=rpc_reading_service.%) --cov-branch --cov-fail-under=100

chaos: $(VENV)/.installed-test
	$(BIN)/python tests/chaos.py --seed $(SEED) --minutes $(MINUTES)

chaos-20: $(VENV)/.installed-test
	$(BIN)/python tests/chaos.py --seed $(SEED) --seeds 20

soak: $(VENV)/.installed-test
	SOAK_SESSIONS=$(SESSIONS) $(BIN)/python -m pytest -m slow --timeout 3600 tests/test_hygiene.py

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each of the project's extras, so that an install is done again only when its inputs change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
