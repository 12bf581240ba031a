# Every target sets itself up: only Python >= 3.10, make and a C++ compiler are needed. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
# Where pip also looks for torch on a machine without an NVIDIA driver: give it torch's own index of CPU wheels where pip
# does not know one, so that no CUDA packages are fetched. Skipped if it cannot be reached.
TORCH_INDEX ?=
# Another torch than the one of constraints.txt: make test VENV=.venv-2.11 TORCH=2.11.0
TORCH ?=
# Test processes, and what to test: make test JOBS=4 TESTS=tests/cli. OPTIMIZED=1 builds the C++ kernels of all tests as for users:
# a few files that have many, and other subjects, build them without optimization (tests/conftest.py).
JOBS ?= 2
TESTS ?=
OPTIMIZED ?=
ARGS ?=
READY := $(VENV)/.ready

.PHONY: help setup demo test test-frameworks fuzz gpu-test bench lint format types docs examples dist clean
help:
	@echo "make demo      train a small GPT twice, with torch's AdamW and with tilestep's, and compare (ARGS=...)"
	@echo "make test      all tests and doctests but those with frameworks (JOBS=2 TESTS=path OPTIMIZED=1)"
	@echo "make test-frameworks  tests with transformers, TRL, peft, accelerate, Lightning, torchtitan and torchao, which it installs"
	@echo "make fuzz      random trainings beside torch's (SEEDS=500 FIRST=0)"
	@echo "make gpu-test  the tests that need a GPU"
	@echo "make bench     all benchmarks on this machine (ARGS='step --out results')"
	@echo "make lint      ruff: rules and formatting;   make format  applies both"
	@echo "make types     mypy"
	@echo "make docs      the documentation site in build/site; a warning or a broken link is an error"
	@echo "make examples  every example in its full length; their pictures are those of the site"
	@echo "make dist      wheel and sdist in dist, tested from the wheel in an environment of its own"

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" sh scripts/setup.sh "$(VENV)"
	@touch $@

# What only the site or the frameworks' tests need is installed by the first `make docs`, `make test-frameworks`.
$(READY)-%: $(READY)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" EXTRAS=dev,$* sh scripts/setup.sh "$(VENV)"
	@touch $@

setup: $(READY)

demo: $(READY)
	$(VENV)/bin/tilestep demo $(ARGS)

# Two test processes share the cores: OpenMP threads that wait must not spin. A file's tests run in one process, which
# starts ranks for all of them once; the longest files begin (tests/conftest.py).
test: $(READY)
	OMP_WAIT_POLICY=passive $(if $(OPTIMIZED),TILESTEP_CXXFLAGS=) $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS) $(or $(TESTS),--ignore tests/frameworks)

test-frameworks: $(READY)-frameworks
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS) tests/frameworks

fuzz: $(READY)
	TILESTEP_FUZZ_SEEDS=$(or $(SEEDS),500) TILESTEP_FUZZ_FIRST=$(or $(FIRST),0) $(VENV)/bin/python -m pytest -o timeout=0 tests/fuzz $(ARGS)

gpu-test: $(READY)
	$(VENV)/bin/python -m pytest -rs -m gpu tests $(ARGS)

bench: $(READY)
	$(VENV)/bin/tilestep bench $(or $(ARGS),all)
	$(if $(ARGS),,$(VENV)/bin/python benchmarks/bench.py compile)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(READY)
	$(VENV)/bin/mypy

docs: $(READY)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

EXAMPLES := language_model own_rule finetune_offloaded overlap capture delta_weights
examples: $(READY)
	for name in $(EXAMPLES); do \
		$(VENV)/bin/python examples/$$name.py --picture docs/images/$$name.png $(ARGS) || exit 1; done
	$(VENV)/bin/torchrun --nproc-per-node 2 examples/data_parallel.py --picture docs/images/data_parallel.png $(ARGS)

dist: $(READY)
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist .
	$(VENV)/bin/python scripts/check_dist.py dist

clean:
	rm -rf "$(VENV)" build dist demo bench trace .pytest_cache .mypy_cache .ruff_cache .hypothesis
