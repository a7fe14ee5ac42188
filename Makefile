# Everything goes through .venv, which scripts/bootstrap.py makes from the lock files and renews when
# they change. Bare `make` prints this help.

PYTHON ?= python3
BIN := .venv/bin
FOR ?=
CHAOS ?=
CA ?=
PROFILES ?=
NAME ?=
REV ?= HEAD^
PEER ?= 1
KILLS ?= 1000
ROUNDS ?= 40
ARGS ?=
# Processes that share the tests: a test waits two thirds of its time. Each takes up to 4 GB with its
# servers. JOBS=0 for none but one.
JOBS ?= $(shell awk -v cores="$$(nproc)" '/^MemTotal/ { most = int($$2 / 4000000); \
  jobs = 3 * cores; if (most < jobs) jobs = most; print (jobs < 2 ? 2 : jobs) }' /proc/meminfo)
# The order of sets is the same every time, too.
PYTEST := PYTHONHASHSEED=$${PYTHONHASHSEED:-0} $(BIN)/python -m pytest
# The plugin of Docker's own client, or the program that came before it.
COMPOSE = $(if $(shell docker compose version 2>/dev/null),docker compose,docker-compose) \
  -p lockstep -f compose/compose.yaml
# Tests that know one major only: `make majors` runs them with each of the others as the default.
BY_MAJOR := $(addprefix tests/faults/test_,campaign.py dead_letters.py failpoints.py large_transaction.py \
  network.py postgres_restarts.py servers_away.py two_daemons.py) $(addprefix tests/integration/test_, \
  keys.py partitions.py pooler.py slot_gaps.py slot_idle.py subtransactions.py)

# Compiled modules are kept: tests start a thousand processes, and each would compile all again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# How often the long tier repeats what has rounds.
LONG := LOCKSTEP_TEST_MAJORS=all LOCKSTEP_ROUNDS=8 LOCKSTEP_KILLS=40 LOCKSTEP_SNAPSHOTS=3 LOCKSTEP_FOLLOWERS=2 \
  LOCKSTEP_VIEWS=3 LOCKSTEP_VIEW_KILLS=1 LOCKSTEP_RUNS=4 LOCKSTEP_SCHEDULES=10000 LOCKSTEP_PAST_STATES=8

.PHONY: help python setup setup-demo classes demo up down test test-slow test-long test-containers lint check bench bench-against \
  campaign cluster majors docs screenshots manifests lock clean

help: ## print this help
	@echo 'Lockstep. Needs Python >= 3.11 and nothing else.'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo '$(PYTHON) is not on PATH: install Python >= 3.11, or name it: make PYTHON=… $(MAKECMDGOALS)'; \
	  exit 1; }

setup: python ## make .venv with everything the tests need
	@$(PYTHON) scripts/bootstrap.py dev

setup-demo: python
	@$(PYTHON) scripts/bootstrap.py $(if $(findstring --no-followers,$(ARGS)),capture,demo)

demo: setup-demo ## watch a live Postgres and its followers (FOR=60s stops and proves it, CHAOS=1 kills parts)
	@$(BIN)/cdc demo $(if $(FOR),--for $(FOR)) $(if $(CHAOS),--chaos) $(ARGS)

up: ## the complete pipeline as containers, on loopback (PROFILES=ui,observability; CA=FILE: a certificate authority for the builds)
	@$(if $(CA),cp '$(CA)' compose/ca.pem)
	@test -s compose/.env || (umask 077 && $(PYTHON) -c 'import secrets; [print(f"LOCKSTEP_{name}={secrets.token_hex(32)}") \
	  for name in ("SECRET", "CONSOLE_TOKEN")]' > compose/.env)
	@$(if $(PROFILES),COMPOSE_PROFILES=$(PROFILES)) $(COMPOSE) up -d --build
	@$(if $(PROFILES),COMPOSE_PROFILES=$(PROFILES)) $(COMPOSE) ps
	@$(if $(findstring ui,$(PROFILES)),. compose/.env && \
	  echo "http://127.0.0.1:$${LOCKSTEP_CONSOLE_PORT:-8600}/#token=$$LOCKSTEP_CONSOLE_TOKEN")

down: ## stop and remove the containers; ARGS=-v also removes their data
	@COMPOSE_PROFILES=ui,observability $(COMPOSE) down $(ARGS)

# Before the tests: many times as long while six processes of theirs wait for it.
classes: setup
	@$(BIN)/python -c 'from cdc.runtime import spark, progress; spark.make_classes(progress.Progress())'

test: classes ## a quarter of an hour on real servers, for every commit (ARGS='-k name' picks, JOBS=0: in one process)
	@$(PYTEST) -n $(JOBS) --tier commit $(ARGS)

test-slow: classes ## the tests of seven seconds and more that `make test` leaves out; a commit must pass them, too
	@$(PYTEST) -n $(JOBS) --tier slow $(ARGS)

test-long: classes ## all the rest, with a new seed, which is printed (LOCKSTEP_SEED=… repeats one)
	@export LOCKSTEP_SEED=$${LOCKSTEP_SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "LOCKSTEP_SEED=$$LOCKSTEP_SEED"; failed=0; \
	$(LONG) $(PYTEST) -n $(JOBS) --tier long $(ARGS) || failed=1; \
	for major in 15 16 18; do echo "Postgres $$major:"; \
	  LOCKSTEP_TEST_PG_MAJOR=$$major $(PYTEST) -n $(JOBS) -q $(BY_MAJOR) $(ARGS) || failed=1; done; \
	exit $$failed

test-containers: setup ## the end-to-end tests on containers; fails without a container engine
	@LOCKSTEP_TEST_REQUIRE=containers TC_POOLING_INTERVAL=0.2 TC_MAX_TRIES=1500 $(BIN)/python -m pytest -m containers $(ARGS)

lint: setup ## format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: lint ## format, lint, types, unit and property tests, in under a minute
	@$(PYTEST) -n $(JOBS) -q tests/unit tests/property $(ARGS)

bench: setup ## measure and print one line of JSON each (NAME=… for one, PEER=0 without the peer)
	@$(BIN)/python -m benchmarks $(NAME) $(if $(filter 0,$(PEER)),--no-peer) $(ARGS)

bench-against: setup ## run a workload here and at another commit in turns (REV=… NAME=…, ARGS='--pairs 5')
	@$(BIN)/python -m benchmarks.against $(REV) $(NAME) $(ARGS)

campaign: setup ## every attack at length: schedules, fuzzing, the model, faults (KILLS=1000, ARGS='--only faults')
	@$(BIN)/python -m tests.campaign --kills $(KILLS) $(ARGS)

cluster: setup ## inject faults into three Kafka brokers in turn under load (ROUNDS=40; LOCKSTEP_SEED=… repeats one)
	@LOCKSTEP_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -q tests/faults -m cluster $(ARGS)

majors: setup ## every case, failovers, prepared transactions, lost slots on Postgres 15 to 18
	@LOCKSTEP_TEST_MAJORS=all $(BIN)/python -m pytest -q tests/cases tests/faults tests/integration \
	  -m majors $(ARGS)
	@for major in 15 16 18; do echo "Postgres $$major:"; \
	  LOCKSTEP_TEST_PG_MAJOR=$$major $(BIN)/python -m pytest -q $(BY_MAJOR) $(ARGS) || exit 1; done

docs: setup ## build the documentation as a site in build/site, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -f scripts/mkdocs.yml
	@echo build/site/index.html

screenshots: setup ## take the pictures of the console in docs/console/ from the demo (needs chromium, chromium-driver)
	@$(BIN)/python -m scripts.screenshots

manifests: setup ## write compose/kubernetes/pipeline.yaml from the Helm chart (needs helm)
	@$(BIN)/python -m scripts.manifests

lock: setup ## renew the lock files from pyproject.toml (ARGS=--keep keeps the versions that they have)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock.py $(ARGS)

clean: ## stop the embedded stack, remove its data and all caches; .venv stays
	@if [ -x $(BIN)/cdc ]; then for home in .lockstep .lockstep/demo; do \
	  $(BIN)/cdc local down --home "$$home" >/dev/null 2>&1 || true; done; fi
	@rm -rf .lockstep .mypy_cache .pytest_cache .ruff_cache .hypothesis htmlcov dist
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
