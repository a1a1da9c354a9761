# Every target works alone, first, on a fresh clone: it makes what it needs. Only python3 and make are assumed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -q --disable-pip-version-check

# The checks run on the CPU wherever they run; `make demo JAX_PLATFORMS=cuda` chooses another device.
export JAX_PLATFORMS ?= cpu
# With libtpu installed (`make aot`), a process on the CPU prints errors unless these name a machine.
export TPU_SKIP_MDS_QUERY ?= 1
export TPU_ACCELERATOR_TYPE ?= v5litepod-4
export TPU_WORKER_HOSTNAMES ?= localhost

.PHONY: help demo test lint format bench aot test-newest host-long mutants train-tiny golden golden-random clean

help:
	@echo "make demo         a real trace through the engine, with the cache and without; writes out/demo-report.html"
	@echo "make test         every test that needs no accelerator"
	@echo "make lint         ruff and pyright;  make format  lets ruff rewrite"
	@echo "make bench        the demo at concurrency 1, 4 and 8; writes out/bench-*.json"
	@echo "make aot          compiles the device programs for TPU and GPU without one, and checks them"
	@echo "make test-newest  the tests on Python 3.13 with the newest jax, where that interpreter is found"
	@echo "make host-long    the state machines of the prefix cache for some minutes, another run each time"
	@echo "make mutants      plants faults in the prefix cache, and shows that the tests catch each; some minutes"
	@echo "make train-tiny   trains the tiny model again, about 15 minutes on two cores"
	@echo "make golden       writes the tests' checkpoints and references again, with torch and transformers"
	@echo "make golden-random  holds random configurations of every family to transformers"
	@echo "make clean        removes what these targets made"

# A stamp file stands for the installed environment: it is made once, and again when its inputs change.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-aot: $(VENV)/.installed
	@$(BIN)/python -m pip install $(INSTALL) -c constraints.txt -e '.[dev,aot]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/mambacache demo

test: $(VENV)/.installed
	@$(BIN)/python -m pytest

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(VENV)/.installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.installed
	@for n in 1 4 8; do \
		$(BIN)/mambacache demo --concurrency $$n --report out/bench-$$n.html --json out/bench-$$n.json || exit 1; \
	done

# The GPU plugin comes without CUDA: a command run by hand in this environment then needs JAX_PLATFORMS=cpu.
aot: $(VENV)/.installed-aot
	@$(BIN)/python -m pytest -m aot
	@echo "$(VENV) now holds libtpu and the GPU plugin: outside make, set JAX_PLATFORMS=cpu to keep JAX from trying them."

# Both ways to find the interpreter can name one that does not run (a pyenv shim without its version).
test-newest:
	@for python in python3.13 "$$(pyenv prefix 3.13.0 2>/dev/null)/bin/python"; do \
		if "$$python" --version >/dev/null 2>&1; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then echo "test-newest: no Python 3.13 found, nothing was run"; exit 0; fi; \
	set -e; \
	test -x $(VENV)-newest/bin/python || "$$python" -m venv $(VENV)-newest; \
	$(VENV)-newest/bin/python -m pip install $(INSTALL) --upgrade --upgrade-strategy eager -e '.[dev]'; \
	$(VENV)-newest/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__)'; \
	$(VENV)-newest/bin/python -m pytest

host-long: $(VENV)/.installed
	@MAMBACACHE_HOST_EXAMPLES=$${MAMBACACHE_HOST_EXAMPLES:-2000} $(BIN)/python -m pytest tests/host/test_tree_machine.py

mutants: $(VENV)/.installed
	@$(BIN)/python tests/mutants.py

train-tiny: $(VENV)/.installed
	@$(BIN)/python -m mambacache_jax.models.tiny.train

$(VENV)-golden/.installed:
	@test -x $(VENV)-golden/bin/python || $(PYTHON) -m venv $(VENV)-golden
	@$(VENV)-golden/bin/python -m pip install $(INSTALL) torch==2.13.0 transformers==5.24.0 safetensors numpy
	@touch $@

golden: $(VENV)-golden/.installed
	@HF_HUB_OFFLINE=1 $(VENV)-golden/bin/python tests/models/golden/make_golden.py

golden-random: $(VENV)/.installed $(VENV)-golden/.installed
	@rm -rf out/golden
	@HF_HUB_OFFLINE=1 $(VENV)-golden/bin/python tests/models/golden/make_golden.py \
		--random 3 --seed $$(date +%j) --out out/golden
	@$(BIN)/python tests/models/golden/check.py out/golden

clean:
	@rm -rf $(VENV) $(VENV)-newest $(VENV)-golden out .pytest_cache .ruff_cache
