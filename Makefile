# make demo   shows the engine at work on this machine (ARGS="--database postgresql://..." and so on)
# make test   runs everything that must pass: linters, types, floors, tests, of which those above the store meet SQLite and
#             PostgreSQL in turns (TESTS="tests/engine -x": some of them, each on both)
# make proof  runs what takes hours: the tests that are left, simulation, fuzz, chaos, soak, every two transactions side by
#             side; one table at the end
# make bench  measures every figure twice, beside what is asked of it (PEERS=1: other queues too; ARGS="--scale 0.1")
# make lowest runs the tests of the engine with the oldest versions of its libraries that pyproject.toml allows
# make docs   builds the documentation site into build/site; a warning is an error
# All need only Python 3.11 or newer and make: the rest goes into .venv, again only when pyproject.toml changes.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Tests start hundreds of processes: without compiled files each compiles the package anew, a quarter of a second of CPU.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-warn-script-location
TESTS ?=

.PHONY: demo test lowest bench screenshots simulate proof docs lint types mypy pyright revision clean

demo: .venv/demo-installed
	@$(BIN)/resilient demo $(ARGS)

test: .venv/dev-installed
	@$(MAKE) --no-print-directory --jobs 3 lint mypy pyright
	$(BIN)/pytest -q $(or $(TESTS),--turns quick --forks auto)

# In an environment of its own; what asks for a browser, a linter or the newest of somebody else's program is left out.
LOWEST := core wire providers store engine adapters django testing
lowest: build/lowest/installed
	PATH="$(CURDIR)/build/lowest/bin:$$PATH" build/lowest/bin/python -m pytest -q $(or $(TESTS),--forks auto $(LOWEST:%=tests/%))

build/lowest/installed: pyproject.toml
	@"$(PYTHON)" -m venv build/lowest
	@build/lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	@build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable '.[dev]'
	@touch $@

# The pictures of docs/images, of the demo in its worst moment; needs chromium.
screenshots: .venv/dev-installed
	$(BIN)/python -m tests.screenshots

# Many runs under virtual time, for a night: a failing seed prints its history, made smaller.
simulate: .venv/dev-installed
	$(BIN)/python -W ignore -m tests.simulation.run --seeds 0:$(or $(SEEDS),10000)

# What takes hours, in pieces that resume; a table at the end. make proof PIECES="claims chaos" for some of them, SCALE=0.01
# for a hundredth of each.
proof: .venv/dev-installed
	@PIECES="$(PIECES)" SCALE="$(SCALE)" $(BIN)/python tests/proof.py

# Every figure of the README, on a server of its own or DATABASE=postgresql://...; on a machine with nothing else to do.
bench: .venv/dev-installed $(if $(PEERS),build/peers/installed)
	@$(BIN)/python -m $(if $(DATABASE),resilient.surface.cli bench all --database "$(DATABASE)",\
	  tests.benchmarks.on_server postgresql bench all) \
	  $(if $(PEERS),--peers "build/peers/bin/python tests/benchmarks/peers.py") $(ARGS)

build/peers/installed:
	@"$(PYTHON)" -m venv build/peers
	@build/peers/bin/python -m pip install --quiet --disable-pip-version-check "pgqueuer[asyncpg]" procrastinate huey uvloop
	@touch $@

# The site of docs/, with pages that docs/hooks/pages.py makes from the code.
docs: .venv/docs-installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "built: build/site (python -m http.server --bind 127.0.0.1 -d build/site)"

lint: .venv/dev-installed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	@$(BIN)/lint-imports --no-logo || { echo "a floor leaks: see [tool.importlinter] in pyproject.toml"; exit 1; }

types: mypy pyright

mypy: .venv/dev-installed
	$(BIN)/mypy --no-error-summary

pyright: .venv/dev-installed
	$(BIN)/pyright --warnings

# After a change of resilient/store/db/tables.py: make revision m="what changes"; then read and tidy the draft.
revision: .venv/dev-installed
	$(BIN)/alembic revision --autogenerate -m "$(m)"

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -m venv .venv || { echo "no virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }

.venv/demo-installed: pyproject.toml | .venv/bin/python
	@echo "Installing into .venv ..."
	@$(PIP) --editable '.[demo,postgres]'
	@touch $@

.venv/dev-installed: pyproject.toml | .venv/bin/python
	@echo "Installing into .venv, with the tools that check it ..."
	@{ $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'; } || $(PIP) --editable '.[dev]'
	@touch $@ .venv/demo-installed

.venv/docs-installed: pyproject.toml | .venv/bin/python
	@echo "Installing into .venv, with what makes the documentation site ..."
	@$(PIP) --editable '.[demo,postgres,metrics,requests,aiohttp,docs]'
	@touch $@
