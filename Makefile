# make train: the quickstart.  make test: ruff, mypy, pytest.  PYTHON= chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETTINGS := pyproject.toml constraints.txt

.PHONY: train test setup clean

train: setup
	$(BIN)/python -m tiny_llm.train experiment=quickstart

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile

setup: $(VENV)/installed

$(VENV)/installed: $(SETTINGS)
	$(PYTHON) -m venv $(VENV)
	@echo "installing what pyproject.toml names into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache
