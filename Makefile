# Everything sets itself up in .venv: Python >= 3.11, git and make are all a machine needs.
PYTHON ?= python3
VENV := .venv
# Tools are started as modules: the first line of a script such as $(VENV)/bin/mypy names its Python,
# and systems refuse such a line with a space in a path or more than 127 characters.
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LOCKED := $(PIP) install --quiet --require-hashes --no-deps --requirement
# torch's build for CUDA names the packages of NVIDIA that it needs; its build for CPUs names none.
OF_CUDA := $(PY) -c 'import sys; from importlib.metadata import requires; \
  sys.exit("nvidia-" not in str(requires("torch")))'
CODE := src tests tools benchmarks scripts examples notebooks
MINUTES ?= 600
JOBS ?= 1
PART ?= 1
# Of two wheels pip takes the one whose hash the index gives, so the build for CPUs is asked for.
CPU_TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements-cpu.lock)
TORCH := $(shell sed -n 's/^torch\(==[^ ;]*\).*/\1/p' requirements.lock)

.PHONY: help install demo test test-data test-long test-versions quick lint format calibrate campaign audit docs clean
help:
	@echo "make demo     set up, then train a small model with and without hasten's techniques"
	@echo "make test     set up, then run the tests: about twelve minutes on two cores"
	@echo "make quick    only the tests that a change can break, in two minutes; SINCE=main~3"
	@echo "make test-data  the tests of the real examples (HASTEN_TEST_DATA) and of the articles' code (HASTEN_TEST_ARTICLES)"
	@echo "make test-long  all tests, with full counts of faults and shapes"
	@echo "make test-versions  models, kernels and trainers with the oldest and the newest releases allowed; half an hour"
	@echo "make lint     set up, then check style and types"
	@echo "make install  set up only; TORCH_INDEX=an index with another build of torch"
	@echo "make calibrate  fit the planner to benchmarks/planner/measurements.json"
	@echo "make campaign thousands of faults on a training run; MINUTES=600, JOBS=1, PART=0.1 of it, PEERS=a Python with Lightning"
	@echo "make audit    known vulnerabilities of the locked dependencies, if the package index lists any"
	@echo "make docs     build the documentation site into build/site"
	@echo "make clean    remove the environment and caches (runs/ stays)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(wildcard requirements*.lock)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hasten needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) can't make a virtual environment; install its venv module"; exit 2; }
	@echo "installing hasten and its pinned dependencies into $(VENV) ..."
	@began=$$(date +%s); \
	  $(if $(TORCH_INDEX),$(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) torch$(TORCH) &&) \
	  { ! $(PIP) install --quiet --dry-run --no-deps '$(CPU_TORCH)' >/dev/null 2>&1 || \
	    $(LOCKED) requirements-cpu.lock; } && \
	  $(LOCKED) requirements.lock && \
	  if $(OF_CUDA); then $(LOCKED) requirements-cuda.lock; fi && \
	  $(PIP) install --quiet --no-deps --no-build-isolation --editable . && \
	  echo "installed in $$(( $$(date +%s) - began )) s"
	@touch $@

demo: install
	@$(PY) -m hasten demo

test: install
	$(PY) scripts/run_tests.py

test-data: install
	$(PY) scripts/run_tests.py --data

test-long: install
	$(PY) scripts/run_tests.py --long

test-versions: install
	$(PY) scripts/test_versions.py

quick: install
	$(PY) scripts/quick.py $(if $(SINCE),--since $(SINCE))

lint: install
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy
	$(PY) scripts/check_language.py

format: install
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

calibrate: install
	$(PY) benchmarks/planner/calibrate.py

campaign: install
	$(PY) benchmarks/campaign/run.py --minutes $(MINUTES) --jobs $(JOBS) --part $(PART) $(if $(PEERS),--peers '$(PEERS)')
	HASTEN_FUZZ=2000 $(PY) -m pytest -q tests/faults/test_fuzz.py

audit: install
	scripts/audit.sh

docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
