# Every target makes its own environment first: python3, make and a C++ compiler are all it needs.
# `make run` answers a question, `make run PROMPT="..."` answers yours, `make test` checks everything.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= What is the capital of France? Answer in one sentence.
ARGS ?=
# Tests that run beside each other: most of them wait for processes to start.
JOBS ?= 3
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt tools/install.py

export PROMPT

.DEFAULT_GOAL := help
.PHONY: help run chat serve test test-slow check format bench clean

help:
	@echo 'make run [PROMPT="..."]   install, then answer from the embedded model'
	@echo 'make chat                 a conversation in the terminal'
	@echo 'make serve [ARGS="..."]   OpenAI-compatible server on 127.0.0.1:8686'
	@echo 'make test                 the tests        make test-slow   those that take minutes'
	@echo 'make check                lint, format, types, shape of the code'
	@echo 'make bench                compare with llama-server on this machine'
	@echo 'make clean                remove the environment and caches'

# One stamp an extra: newer than its inputs means there is nothing to install.
$(VENV)/.demo: $(INPUTS)
	@$(PYTHON) tools/install.py --venv $(VENV) demo
	@touch $@

$(VENV)/.dev: $(INPUTS)
	@$(PYTHON) tools/install.py --venv $(VENV) demo dev
	@touch $(VENV)/.demo $@

$(VENV)/.bench: $(INPUTS)
	@$(PYTHON) tools/install.py --venv $(VENV) demo bench
	@touch $(VENV)/.demo $@

run: $(VENV)/.demo
	@$(BIN)/stoker run $(ARGS) -- "$$PROMPT" < /dev/null

chat: $(VENV)/.demo
	@$(BIN)/stoker chat $(ARGS)

serve: $(VENV)/.demo
	@$(BIN)/stoker serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py tests/unit/test_shape.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.bench
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
