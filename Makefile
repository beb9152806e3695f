# One environment in .venv, one command per intent. `make help` lists them.

PYTHON ?= python3.11 python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
START = notebooks/00_start_here.ipynb
# Tests side by side; on a GPU in turn, since tests look at the memory of the device. A worker without work takes some of
# another's; a notebook's cells stay together.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,logical --maxprocesses=4)
SPREAD = --numprocesses=$(WORKERS) --dist=worksteal
UNIT = $(SPREAD) -m 'not end_to_end and not soak and not sglang' --ignore=tests/notebooks tests
END_TO_END = $(SPREAD) -m 'end_to_end and not soak and not sglang' --ignore=tests/notebooks tests
NOTEBOOKS = --numprocesses=$(WORKERS) --dist=loadfile notebooks tests/notebooks

# SGLang brings a torch of its own, so servers have an environment of their own. One that is named is taken as it is.
SERVERS = .venv-sglang
SERVERS_STAMP = $(if $(CGLAB_SGLANG_PYTHON),,$(SERVERS)/.installed)

# What asks about vulnerabilities has packages of its own, which are no part of what it asks about.
AUDIT = .venv-audit

# $(call LIMIT,SECONDS) before a command ends it after that time, where coreutils' timeout exists.
LIMIT = $(if $(shell command -v timeout),timeout --foreground --kill-after=30 $(1))

.PHONY: help demo lab test test-unit test-end-to-end test-notebooks test-sglang refresh check soak audit
.DELETE_ON_ERROR:

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

demo: $(STAMP) ## run the main job: executed notebook, report, results.jsonl
	$(call LIMIT,600) $(BIN)/python -m cglab demo $(if $(OUT),--out $(OUT))

lab: $(STAMP) ## open JupyterLab on the start notebook (this machine only, with a token)
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/$(START) --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) \
	  --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate

test: check test-unit test-end-to-end test-notebooks ## lint, types, layers, all tests but those of real servers

test-unit: $(STAMP) ## the unit tests alone
	$(call LIMIT,2400) $(BIN)/python -m pytest --timeout=300 $(UNIT)

test-end-to-end: $(STAMP) ## whole requests in every mode, the browser, other processes, what is shipped
	$(call LIMIT,2400) $(BIN)/python -m pytest --timeout=300 $(END_TO_END)

test-notebooks: $(STAMP) ## run the notebooks, with a model of another kind too, and compare what they promise
	$(call LIMIT,1200) $(BIN)/python -m pytest --timeout=300 $(NOTEBOOKS)

test-sglang: $(STAMP) $(SERVERS_STAMP) ## start real SGLang servers and test with them
	$(call LIMIT,600) $(BIN)/python -m pytest --timeout=570 -m sglang tests/serving

refresh: $(STAMP) ## execute the notebooks and store them in normal form
	$(call LIMIT,1200) $(BIN)/python scripts/refresh_notebooks.py $(FILES)

check: $(STAMP) ## lint, format, types, layers
	$(call LIMIT,120) $(BIN)/ruff check
	$(call LIMIT,120) $(BIN)/ruff format --check
	$(call LIMIT,600) $(BIN)/mypy
	$(call LIMIT,120) $(BIN)/lint-imports

soak: $(STAMP) ## the exhaustive and long tests, and guards taken away
	$(call LIMIT,14400) $(BIN)/python -m pytest --timeout=7200 -m soak
	$(call LIMIT,3600) $(BIN)/python scripts/mutation_check.py

audit: $(if $(ADVISORIES),$(STAMP),$(AUDIT)/bin/pip-audit) ## known vulnerabilities of all pins, by the network or ADVISORIES=checkout
	$(call LIMIT,600) $(if $(ADVISORIES),$(BIN)/python scripts/audit.py --advisories "$(ADVISORIES)",$(AUDIT)/bin/python scripts/audit.py)

# $(call NEW_VENV,FOLDER) makes an environment. A half-made one has no pip and is made anew.
define NEW_VENV
@test -x $(1)/bin/pip || { \
  for python in $(PYTHON); do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
      exec $$python -m venv --clear $(1); \
    fi; \
  done; \
  echo "cglab needs Python 3.11 or newer and found none as: $(PYTHON). Try: make PYTHON=/path/to/python3.11" >&2; \
  exit 1; \
}
endef

# Installed again only when what it is made of changed.
$(STAMP): pyproject.toml constraints.txt
	$(call NEW_VENV,$(VENV))
	$(call LIMIT,1800) $(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# About four minutes and 11 GB; what is used is compiled when it is used.
$(SERVERS)/.installed: pyproject.toml
	$(call NEW_VENV,$(SERVERS))
	$(call LIMIT,600) $(SERVERS)/bin/python -m pip install --no-compile --editable '.[sglang]'
	@touch $@

$(AUDIT)/bin/pip-audit:
	$(call NEW_VENV,$(AUDIT))
	$(call LIMIT,600) $(AUDIT)/bin/python -m pip install 'pip-audit>=2.9,<3'
