# Each target is one command. `make check` makes the environment that lint, fmt, types and dist use.
.PHONY: check test lint fmt types docs bench demo dist
python := .venv/bin/python

check: ; bin/test
test: ; bin/test quick
lint: ; $(python) -m ruff check .
fmt: ; $(python) -m ruff format .
types: ; $(python) -m mypy
docs:
	$(python) -m tests.reference > docs/reference.md
	$(python) -m anvil_mux config --schema > compose/anvil-mux.schema.json
bench: ; bin/bench-relay
demo: ; bin/anvil-mux serve --demo
dist: ; $(python) -m pip wheel --no-deps --wheel-dir dist .
