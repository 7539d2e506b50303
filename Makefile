# make demo: install and train; make test: the tests; make test-cluster: those that take long, or clusters;
# make check: lint and types; make bench: the figures; make soak: ten minutes of training in which workers are killed;
# make coverage: all tests, several times as slow, with the lines that they reach. CI runs check, test and test-cluster.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-cluster coverage check bench soak clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/steepest demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not ray and not cluster and not long" --numprocesses=2
	$(BIN)/python -m pytest -m "ray and not cluster and not long"

test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m "long and not ray" --numprocesses=2
	$(BIN)/python -m pytest -m "cluster or (long and ray)"

coverage: $(STAMP)
	$(BIN)/python -m pytest --cov --cov-report=term

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.overhead

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes 10

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
