# Every target makes its own environment first: python3, make and a C++ compiler are all it needs.
# `make run` answers a question, `make run PROMPT="..."` answers yours, `make test` checks everything.
# llama.cpp is built for the GPU that is here, where its toolkit is too, else for the CPU; CMAKE_ARGS, CXX, CXXFLAGS, ... say
# otherwise and are remembered: CMAKE_ARGS= make run (the CPU alone), CMAKE_ARGS="-DGGML_CUDA=on" make run

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= What is the capital of France? Answer in one sentence.
ARGS ?=
# Tests that run beside each other: most of them wait for processes to start.
JOBS ?= 3
BIN := $(VENV)/bin
# It compares what is there with what is wanted, and does nothing where they are the same.
INSTALL := @$(PYTHON) tools/install.py --venv $(VENV)

export PROMPT
# Images of containers often set this: each of the hundreds of processes of the tests would compile all of Stoker.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run chat serve test test-long test-slow check format reference bench bench-compare rebuild clean demo dev peer browser vendor screenshots

help:
	@echo 'make run [PROMPT="..."]   install, then answer from the embedded model'
	@echo 'make chat                 a conversation in the terminal'
	@echo 'make serve [ARGS="..."]   OpenAI-compatible server on 127.0.0.1:8686'
	@echo 'make test                 the tests        make test-long   those that take seconds each'
	@echo 'make test-slow            those that take minutes each'
	@echo 'make check                lint, format, types, shape of the code'
	@echo 'make reference            write the pages of docs/ that follow from the code'
	@echo 'make vendor               fetch the libraries of the page (npm)'
	@echo 'make screenshots          take the pictures of docs/images'
	@echo 'make bench                compare with llama-server on this machine'
	@echo 'make bench-compare BASE=commit   compare with Stoker as it was then'
	@echo 'make rebuild              build llama.cpp again'
	@echo 'make clean                remove the environment and caches'

demo:
	$(INSTALL) demo

dev:
	$(INSTALL) demo dev

peer:
	$(INSTALL) demo bench

rebuild:
	$(INSTALL) --again demo

# The demo answers what the model finds likeliest; ARGS may say otherwise.
run: demo
	@$(BIN)/stoker run --temperature 0 $(ARGS) -- "$$PROMPT" < /dev/null
	$(INSTALL) --say

chat: demo
	@$(BIN)/stoker chat $(ARGS)

serve: demo
	@$(BIN)/stoker serve $(ARGS)

# Without a browser the tests of the page are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo '  installing Chromium for the tests of the page' && \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q --no-install-recommends chromium fonts-liberation; } >$(VENV)/browser.log 2>&1; } \
	  || echo '  no Chromium: the tests of the page will be skipped'

# A shell may forbid bytecode: each of the thousand processes that the tests start would then compile Stoker anew.
test: dev browser
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-long: dev browser
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) -m "long and not slow" $(ARGS)

test-slow: dev browser
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -m slow $(ARGS)

check: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py tests/unit/test_shape.py

reference: dev
	$(BIN)/python -m tools.reference_pages

vendor: dev
	$(BIN)/python -m tools.vendor_ui

screenshots: dev browser
	$(BIN)/python -m tools.screenshots

format: dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: peer
	$(BIN)/python -m bench $(ARGS)

bench-compare: peer
	@test -n "$(BASE)" || { echo 'make bench-compare BASE=commit: which commit to compare with' >&2; exit 2; }
	$(BIN)/python -m bench --base "$(BASE)" $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
