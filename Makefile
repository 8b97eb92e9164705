# Everything a newcomer needs from nothing but Python 3.11+ and pip: each target installs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: test lint demo bench docs clean

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

demo: $(STAMP)
	$(BIN)/rebm run quickstart

# Other engines take part where they can be had, each by itself; llama.cpp is built from source, which
# takes minutes.
bench: $(STAMP)
	for engine in ctranslate2 openvino-genai llama-cpp-python; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$engine || true; \
	done
	$(BIN)/rebm bench --page docs/benchmarks.md

docs: $(STAMP)
	$(BIN)/python -m residual_ebm.command_help > docs/commands.md
	$(BIN)/python -m residual_ebm.report.results_page docs/results.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Made anew when the dependencies change; touched last, so that an interrupted install is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON = $(PYTHON): too old; residual-ebm needs Python 3.11 or newer" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
