# How Elastable is installed, run and checked. `make` alone lists the targets.
#
# Every target installs what it needs into .venv first. A stamp file remembers that an extra set is
# installed, so a second call starts at once; it goes stale when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# The main job: one master and two workers on this machine, tables in the embedded memory store.
RUN_COMMAND ?= $(BIN)/elastable train examples/flights/model.py \
  --workers 2 --micro-batch-size 512 --grads-to-wait 2 --epochs 1
# `make test ARGS="tests/worker -k combiner"` narrows the run.
ARGS ?=
# Processes that run tests. Jobs wait for one another now and then, so two more than there are cores keep these busy.
TEST_PROCESSES ?= $$(( $$(nproc) + 2 ))
# Modules go to processes whole, so that what is started once a module is, and the dearest first (tests/plugins/order.py).
pytest = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder
FAST_TESTS := tests/embedding_store tests/master $(wildcard tests/test_*.py)

STUB_PACKAGES := embedding_store/v1 master/v1 serving/v1
# $(call generate,FOLDER) writes the stubs of proto/ below FOLDER; protoc finds mypy's plugin on PATH.
generate = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --mypy_out=$(1) \
  --grpc_python_out=$(1) --mypy_grpc_out=$(1) $(wildcard proto/elastable/*/v1/*.proto)
# The wheel of pykeen holds small knowledge graphs. Its files are read and nothing of it is imported, so
# what it depends on (torch among it) stays out.
install-graphs = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps pykeen -c constraints.txt
SOURCES     := embedding_store master worker replicas elastable benchmarks docs examples tests

# Hundreds of processes import the same modules: where this is set, each of them would compile all of these again.
unexport PYTHONDONTWRITEBYTECODE

# PyTorch's wheels are gigabytes: an environment of its own, made once, whose Python tests/backends starts.
TORCH_VENV := .venv-torch

RUN_STAMP  := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP  := $(VENV)/.installed-dev
TORCH_STAMP := $(TORCH_VENV)/.installed
PINS       := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install run run-stream test test-fast test-slow test-torch lint format types proto proto-check hooks wheel coverage chaos chaos-stream soak fuzz same-bits keras-table mutations reference site bench bench-peers bench-kg compose-test clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(RUN_STAMP) ## create .venv and install what `make run` needs

run: $(RUN_STAMP) ## train the flights example: one master, two workers
	$(RUN_COMMAND)

run-stream: $(RUN_STAMP) ## predict clicks of users whose tastes drift, with a job that trains on them and without
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python examples/stream/run.py

test: $(TEST_STAMP) ## run all tests against real servers (ARGS= narrows them; ARGS="-n 0" runs them one by one)
	$(pytest) $(ARGS)

test-fast: $(TEST_STAMP) ## run what needs neither servers nor processes, in under a minute
	$(pytest) --quick $(FAST_TESTS) $(ARGS)

test-torch: $(TEST_STAMP) $(TORCH_STAMP) ## run the tests of Keras' PyTorch backend, in .venv-torch (gigabytes)
	$(pytest) -m "not compose" -k torch tests/backends $(ARGS)

test-slow: export TF_ENABLE_ONEDNN_OPTS = 1
test-slow: $(TEST_STAMP) $(TORCH_STAMP) ## hours: all tests in random order with random draws, then chaos, soak and fuzz at length
	$(pytest) -m "not compose" --seed random --random-order $(ARGS)
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.chaos --noticed
	$(BIN)/python -m tests.chaos.stream
	$(BIN)/python -m tests.chaos.soak
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.keras_programs

lint: $(DEV_STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(DEV_STAMP) ## ruff: repair what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(DEV_STAMP) ## mypy --strict
	$(BIN)/mypy

proto: $(DEV_STAMP) ## regenerate the stubs from proto/
	$(call generate,.)

proto-check: $(DEV_STAMP) ## fail when the stubs are not what proto/ generates
	@rm -rf build/stubs && mkdir -p build/stubs
	$(call generate,build/stubs)
	@for package in $(STUB_PACKAGES); do \
	  diff -ru -x __init__.py -x __pycache__ elastable/$$package build/stubs/elastable/$$package >&2 || { \
	    echo "make: $$package differs from what proto/ generates; run 'make proto' and commit the result" >&2; exit 1; }; \
	done

hooks: $(DEV_STAMP) ## lint, types and quick tests before every commit (pre-commit)
	$(BIN)/pre-commit install

wheel: $(BIN)/python ## build dist/elastable-*.whl
	@rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

coverage: $(DEV_STAMP) ## run all tests, report what they do not reach, and hold the floor (ARGS= narrows them, without a floor)
	@mkdir -p build/coverage
	$(pytest) --cov --cov-report=html --cov-report=term:skip-covered $(if $(ARGS),--cov-fail-under=0) $(ARGS)

chaos: $(TEST_STAMP) ## hundreds of seeded schedules of faults on real processes (ARGS="--kind redis --seed 17")
	$(BIN)/python -m tests.chaos $(ARGS)

chaos-stream: $(TEST_STAMP) ## a million events, and 100 kills of workers, masters, store servers and their broker (ARGS="--seed 3")
	$(BIN)/python -m tests.chaos.stream $(ARGS)

soak: $(TEST_STAMP) ## 20 minutes of training with a worker killed every 10 seconds (ARGS="--minutes 5")
	$(BIN)/python -m tests.chaos.soak $(ARGS)

fuzz: $(TEST_STAMP) ## a million hostile calls, frames, files and replies (ARGS="--seconds 60 --seed 7 --only frames")
	$(BIN)/python -m tests.fuzz $(ARGS)

same-bits: $(TEST_STAMP) ## run small jobs in a worktree of the commit OLD and here; their bits must be the same (OLD=main)
	$(BIN)/python -m tests.same_bits against $(or $(OLD),$(error say which commit to compare with: make same-bits OLD=<commit>)) $(ARGS)

keras-table: $(TEST_STAMP) ## run what Keras programs may say against plain Keras, and write docs/keras.md; then a hundred drawn ones
	$(BIN)/python -m tests.keras_table
	$(BIN)/python -m tests.keras_programs --programs 100

mutations: $(TEST_STAMP) ## change conditions that guard data, one at a time: their room's tests must notice (ARGS="--only 3")
	$(BIN)/python -m tests.mutations $(ARGS)

reference: $(TEST_STAMP) ## write docs/reference.md: errors, exit codes and metrics, as the code has them
	$(BIN)/python docs/site/reference.py

site: $(TEST_STAMP) ## build the documentation as a site, in build/site
	@mkdir -p build
	$(BIN)/python docs/site/build.py

bench: $(TEST_STAMP) ## measure every figure the README quotes
	$(BIN)/python -m benchmarks

bench-peers: $(TEST_STAMP) ## race other libraries, installed below .peers/ for it
	$(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks.peers

bench-kg: $(TEST_STAMP) ## quality of knowledge-graph models, with settings and time (long; ARGS="codex-s-complex")
	$(BIN)/python -m benchmarks.graphs.kg_quality $(ARGS)

compose-test: ## docker-compose on a real engine, a worker killed in the middle
	deploy/compose-test.sh

clean: ## remove caches and build leftovers (runs/ and .venv stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv, .venv-torch and .peers, too
	rm -rf $(VENV) $(TORCH_VENV) .peers

# --- installation ---------------------------------------------------------------------------------

$(BIN)/python $(TORCH_VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no '$(PYTHON)' on PATH; install Python 3.11 or later, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) -V); Elastable needs Python 3.11 or later (make PYTHON=python3.11)" >&2; exit 1; }
	@$(PYTHON) -m venv $(@:/bin/python=) || $(PYTHON) -m virtualenv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); \
	  echo "make: $(PYTHON) has neither a working venv (Debian: package python3-venv) nor virtualenv" >&2; exit 1; }

$(RUN_STAMP): $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples]' -c constraints.txt
	@touch $@

$(TEST_STAMP): $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples,test]' -c constraints.txt
	$(call install-graphs)
	@touch $(RUN_STAMP) $@

$(DEV_STAMP): $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples,test,dev]' -c constraints.txt
	$(call install-graphs)
	@touch $(RUN_STAMP) $(TEST_STAMP) $@

$(TORCH_STAMP): $(PINS) | $(TORCH_VENV)/bin/python
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' requests -c constraints.txt
	@touch $@
