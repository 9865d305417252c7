# Everything a contributor or CI runs. Every target but `clean` first brings .venv up to date.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# Tests start hundreds of processes. Each compiles the sources anew where an environment forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
# One process more than processors: tests of servers and hosts wait, for timeouts and for one another.
PYTEST_ARGS ?= -n $(shell expr $$(nproc) + 1) --dist loadfile
# A process for each GPU, or GPU_PROCESSES in turn, each of which sees one; the server's tests need none. Without an environment: python -m pytest $(make -s print-gpu-args)
GPUS ?= $(shell nvidia-smi -L 2> /dev/null | grep -c ^GPU)
GPU_PROCESSES ?= $(GPUS)
GPU_ARGS = -v --device cuda -m gpu -p twinfer.gpu.kernels --ignore-glob=*/test_tpu_* --ignore-glob=*/test_server* --ignore-glob=*/test_dashboard* --continue-on-collection-errors --durations=15 -n $(GPU_PROCESSES) \
	--dist worksteal tests/unit tests/e2e

BIN := .venv/bin
STAMP := .venv/.stamp

# What must not be in any file: paths of somebody's own machine, and leftovers of a merge.
FORBIDDEN := (^|[^A-Za-z0-9_.}-])/(home|root|work|Users)/|^(<{7}|>{7}) .

.PHONY: setup setup-xla test-xla check test test-slow test-share test-tpu test-gpu print-gpu-args demo bench numerics docs clean

setup: $(STAMP)

# The checkout may have any name, but mypy takes a package's name from its folder: it reads the sources through a link.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	mkdir -p .venv/check
	ln -sfn ../.. .venv/check/twinfer
	touch $@

# torch-xla needs a torch of its own release, so it has an environment of its own; JAX is there as the other side of comparisons.
XLA_BIN := .venv-xla/bin
XLA_STAMP := .venv-xla/.stamp
XLA_TOOLS = pytest pytest-timeout pytest-xdist hypothesis

setup-xla: $(XLA_STAMP)

$(XLA_STAMP): pyproject.toml constraints.txt constraints-xla.txt
	test -x $(XLA_BIN)/python || $(PYTHON) -m venv .venv-xla
	{ grep -vE '^(torch|triton)==' constraints.txt; cat constraints-xla.txt; } > .venv-xla/constraints.txt
	$(XLA_BIN)/python -m pip install --disable-pip-version-check -q -c .venv-xla/constraints.txt -e '.[torch-xla,jax,transformers]' $(XLA_TOOLS)
	touch $@

ROOMS = bucketing shared ops gpu tpu xla numerics serving

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.venv/check $(BIN)/mypy $(ROOMS:%=-p twinfer.%)
	$(BIN)/lint-imports --no-logo
	git grep --no-index --exclude-standard -nIE '$(FORBIDDEN)' && exit 1 || test $$? -eq 1

test: $(STAMP)
	$(BIN)/pytest -m 'not slow' $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

# As much of the slow tests as there is time for; each commit begins elsewhere, so that all have their turn.
SHARE_MINUTES ?= 25
test-share: $(STAMP)
	$(BIN)/pytest -m slow -n auto --dist worksteal -rsfE --share "$$(git rev-parse HEAD):$(SHARE_MINUTES)"

# The worker of torch-xla, on the CPU: what no other target collects.
test-xla: $(XLA_STAMP)
	$(XLA_BIN)/python -m pytest tests/xla --durations=10

# What is proven about TPUs without one, by interpreters and by libtpu's compiler: needs no TPU.
test-tpu: $(STAMP)
	$(BIN)/pytest tests/unit/test_tpu_*.py tests/e2e/test_tpu_*.py $(PYTEST_ARGS)

# What only a GPU can show. Fails where there is none; a file that lacks a library is an error, and the others run.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest $(GPU_ARGS)

print-gpu-args:
	@echo '$(GPU_ARGS)'

demo: $(STAMP)
	$(BIN)/twinfer demo

bench: $(STAMP)
	$(BIN)/python scripts/bench_scheduler.py

numerics: $(STAMP)
	$(BIN)/twinfer numerics model --model demo --a jax:cpu --b torch:cpu

docs: $(STAMP)
	$(BIN)/python scripts/write_options.py
	$(BIN)/python scripts/check_docs.py

clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
