# Headrace, one command for each thing. `make` alone lists them.
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# `make test` draws the same every time, so that it says something of the change; `make prove` draws anew.
SEED ?= 1
SEEDS ?= 1-2000
# The commands that tests start, from Debian packages; `make test` with files sets up what those need.
PACKAGES ?= etcd ip kcat node npm strace java
PYTHON_FILES := src tests tools bench examples setup.py
# What setup.py compiles.
KERNELS := $(foreach types,$(wildcard src/headrace/records/*.pxd),$(types) $(types:.pxd=.py))
# A broker runs no others. Routing uses the C types of building: one of them compiled and the other not is no program.
FIRST_KERNELS := kernel key_hashes builder router
# The package, compiled, and what it needs; the steps of a set-up are taken at once where they allow it.
SERVING := $(VENV)/.serving $(VENV)/.runtime
RUNTIME := $(VENV)/.compiled $(VENV)/.runtime
CHECK := $(VENV)/.check
TESTS := $(VENV)/.compiled $(VENV)/.tests

.DEFAULT_GOAL := help
.PHONY: help serve demo packages quick test check prove sim mutate bench reference unasync house dist inventory format clean

help:
	@echo 'make serve      run a broker here; ARGS="--data ./data --listen 127.0.0.1:9092" go to headrace serve'
	@echo 'make demo       broker, traffic, archive, a kill -9, a plot and an audit, in a few minutes; KEEP=1 keeps its folder'
	@echo 'make quick      in a minute: the rooms without other processes, one broker, lint and types of what changed'
	@echo 'make test       everything: checks, unit tests, real clients, faults (ARGS go to pytest: ARGS=tests/wire)'
	@echo 'make check      format, lint, types, layers, tidiness'
	@echo 'make prove      the long runs; their figures are added to docs/PROOF.md'
	@echo 'make sim        clusters under simulated faults: SEEDS=1-2000 of them, or one seed that broke a rule, told in full'
	@echo 'make mutate     change the code one small thing at a time and list what no test and no seed finds (ARGS=--help)'
	@echo 'make bench      the benchmark beside other brokers (ARGS go to bench/run.py)'
	@echo 'make house      draw docs/house.svg, the rooms and their imports'
	@echo 'make reference  write docs/API.md, CLI.md, METRICS.md, PROTOCOL.md, SETTINGS.md from the code'
	@echo 'make unasync    write producer and consumer of headrace.aio from those for threads'
	@echo 'make dist       an sdist and a compiled wheel, in dist/'
	@echo 'make inventory  take the table of the last make test as docs/INVENTORY.md'
	@echo 'make format     let ruff format and mend what it can'
	@echo 'make clean      remove the virtual environment and everything that was built'

# The kernels that are left, all for clients, are compiled while the broker runs: until then clients are only slower.
serve:
	@$(MAKE) --silent --jobs $(SERVING)
	@nice $(MAKE) $(VENV)/.compiled >$(VENV)/compiling.log 2>&1 </dev/null &
	@exec $(BIN)/headrace serve $(ARGS)

demo: $(VENV)/.compiled $(VENV)/.spark
	@tools/packages.py java
	@$(BIN)/python tools/demo.py

$(VENV)/.made: tools/setup.sh constraints.txt
	@tools/setup.sh venv

$(VENV)/.serving: NAMES := $(FIRST_KERNELS)
$(VENV)/.serving $(VENV)/.compiled: setup.py $(KERNELS) $(VENV)/.made
	@tools/setup.sh compile $(@F) $(NAMES)

$(VENV)/.spark: EXTRAS := spark
$(VENV)/.check: EXTRAS := dev,arrow,etcd
$(VENV)/.tests: EXTRAS := dev,arrow,etcd,spark,declarative,iceberg
$(VENV)/.runtime $(VENV)/.spark $(VENV)/.check $(VENV)/.tests: pyproject.toml setup.py constraints.txt $(VENV)/.made
	@tools/setup.sh install $(@F) $(EXTRAS)

packages:
	@tools/packages.py $(PACKAGES)

.work/node/.installed: tests/clients/kafkajs/package.json | packages
	@tools/setup.sh node

quick: $(VENV)/.compiled $(CHECK)
	@$(BIN)/python tools/side_by_side.py --quick --seed $(SEED) --hypothesis-seed $(SEED) $(ARGS)

test:
	+@MAKE='$(MAKE)' tools/setup.sh tests $(ARGS)
	@mkdir -p .work && rm -f .work/proven*.json
	@$(BIN)/python tools/side_by_side.py --proven .work/proven.json -m 'not long' --seed $(SEED) --hypothesis-seed $(SEED) $(ARGS)
	@$(if $(ARGS),,$(BIN)/python tools/inventory.py compare)

check: $(CHECK)
	@$(BIN)/python tools/check.py

prove: packages $(TESTS) .work/node/.installed
	$(if $(ARGS),,$(BIN)/python -m pytest -m 'not long' --layout shared tests/clients tests/faults tests/kafka_protocol)
	$(BIN)/python -m pytest -m long --timeout 3600 --proof docs/PROOF.md $(ARGS)

sim: $(RUNTIME)
	@$(BIN)/python tools/simulate.py $(SEEDS) $(ARGS)

mutate: $(TESTS)
	@$(BIN)/python tools/mutate.py $(ARGS)

bench: $(TESTS)
	$(BIN)/python bench/run.py $(ARGS)

house: $(CHECK)
	@$(BIN)/python tools/house.py

reference: $(TESTS)
	@$(BIN)/python tools/reference.py

unasync: $(CHECK)
	@$(BIN)/python tools/unasync.py

dist: $(RUNTIME)
	@$(BIN)/python tools/dist.py

inventory:
	@$(BIN)/python tools/inventory.py accept

format: $(CHECK)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)

clean:
	rm -rf $(VENV) .work build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name node_modules -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
	rm -f src/headrace/*/*.so src/headrace/*/*.c
