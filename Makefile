# make setup · make learn · make test · make grade · make build · make browser · make sweep
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
NOTEBOOKS ?= $(sort $(wildcard solutions/*.ipynb))
REPORT ?= build/report
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup learn test grade build browser sweep clean

help:
	@echo "make setup   create $(VENV) with everything the course needs"
	@echo "make learn   open the course in JupyterLab"
	@echo "make test    run every test that needs no GPU"
	@echo "make grade   grade the whole course with the reference solutions; report in $(REPORT)"
	@echo "make build   build notebooks/ and solutions/ from lessons/"
	@echo "make browser work through every lesson in JupyterLab, in a real browser"
	@echo "make sweep   train on every layout of 8 ranks and many of 16, compare with one process (20 minutes)"
	@echo "make clean   remove what the commands above made, but not $(VENV)"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11: install a newer one and run make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# JupyterLab asks at its first start whether it may fetch news: nothing that a learner came for.
	@$(BIN)/jupyter labextension disable --level=sys_prefix @jupyterlab/apputils-extension:announcements >/dev/null 2>&1
	@touch $(READY)

learn: setup
	$(BIN)/fivefold doctor
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) \
	  $(LAB_FLAGS) $(firstword $(wildcard notebooks/index.ipynb) $(sort $(wildcard notebooks/*.ipynb)))

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not gpu and not every_lesson" -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

grade: setup
	mkdir -p $(REPORT)
	$(BIN)/autograde grade $(NOTEBOOKS) \
	  --json $(REPORT)/report.json --junit $(REPORT)/junit.xml --html $(REPORT)/index.html

build: setup
	$(BIN)/autograde build

browser: setup
	$(BIN)/python -m pytest tests/browser $(PYTEST_FLAGS)

sweep: setup
	$(BIN)/python bench/sweep.py --json bench/results/sweep.json

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis *.egg-info lib/*.egg-info
