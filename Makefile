# `make demo` and `make test` set everything up themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKEND := $(shell [ "$$(uname -s)" = Linux ] && echo cpu,)

.PHONY: demo test test-metal docs lint format clean

demo: $(VENV)/.installed
	$(BIN)/mlx-lattice demo --out demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# The whole suite with the Metal routes, their kernels run on the CPU (needs clang).
test-metal: $(VENV)/.installed
	MLX_LATTICE_METAL=host $(BIN)/python -m pytest --ignore-glob='tests/test_cpu*' --ignore-glob='tests/test_metal*'

# The site, into site/; nothing is fetched, and a warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An editable install: Python changes are live; it runs again when the build changes.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard cpu/*)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'mlx_lattice needs Python 3.10 or newer: make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(BACKEND)dev]"
	touch $@

clean:
	rm -rf $(VENV) build demo site .pytest_cache .ruff_cache .hypothesis
