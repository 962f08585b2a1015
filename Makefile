# Everything a contributor runs; continuous integration runs the same (.ci/run).
# A virtual environment in .venv is made, and brought up to date, whenever a target needs it.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
ROOMS := buckets capture model scheduler
MUTATIONS := $(basename $(notdir $(wildcard tests/mutations/*.toml)))

.DELETE_ON_ERROR:
.PHONY: help run quick test check lint type mutate bench figures pictures gpu-check clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-input --timeout 60 --retries 2 -c constraints.txt -e '.[dev]'
	@touch $@

run: $(READY) ## generate with the built-in model, wavefront off and on
	$(BIN)/wavegraph demo

quick: $(READY) ## what a change needs, in half a minute: lint and tests by changed files
	$(BIN)/python -m tools.quick --jobs $(JOBS)

test: $(READY) ## the quick tests
	$(BIN)/pytest -q -n $(JOBS) -m "not slow"

check: lint type ## everything: lint, types, all tests, mutations
	$(BIN)/pytest -q -n $(JOBS)
	$(MAKE) mutate

lint: $(READY) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The rooms stand at the root but are packaged under `wavegraph`; mypy follows no import hook, so it is given
# the package as a tree of links.
type: $(READY) ## mypy --strict
	rm -rf build/types
	mkdir -p build/types/wavegraph
	cd build/types/wavegraph && ln -s ../../../wavegraph/* $(ROOMS:%=../../../%) .
	ln -s ../../tools ../../examples build/types
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache wavegraph tools examples

mutate: $(READY) ## break the code on purpose, see that the tests notice
	for list in $(MUTATIONS); do $(BIN)/python tests/mutations/run.py $$list --jobs $(JOBS) || exit 1; done

bench: $(READY) ## steps and host time of the scheduler, no model
	@for chunk in 16 32 64 128; do for mode in --no-wavefront --wavefront; do \
	  printf 'chunk %3d %-14s ' $$chunk $$mode; \
	  $(BIN)/wavegraph simulate --requests 4 --prompt-len 8064 --chunk $$chunk \
	    --max-batched-tokens 1024 $$mode --json - || exit 1; \
	done; done

RESULTS := benchmarks/results
MEASURE = $(BIN)/wavegraph bench

figures: $(READY) ## every figure of docs/benchmarks.md, measured on this machine: about an hour
	mkdir -p $(RESULTS) build
	$(MEASURE) step --json $(RESULTS)/step.json
	$(MEASURE) replay --json $(RESULTS)/replay.json
	$(MEASURE) attention --json $(RESULTS)/attention.json
	$(MEASURE) prefill --workload 1x512,4x512 --chunks 128,64,32,16,8,auto --repeats 3 --json $(RESULTS)/prefill-512.json
	$(MEASURE) prefill --workload rfc --scale 0.125 --chunks 128,64,32,16 --repeats 1 --json $(RESULTS)/prefill-rfc.json
	$(MEASURE) prefill --workload mixed-32 --scale 0.25 --max-num-seqs 4 --chunks 128,64,32,16 --repeats 3 \
	  --json $(RESULTS)/prefill-mixed-32.json
	$(MEASURE) prefill --workload mixed-128 --scale 0.25 --max-num-seqs 8 --chunks 128,64,32,16 --repeats 3 \
	  --json $(RESULTS)/prefill-mixed-128.json
	$(MEASURE) decode --tokens 32 --prompt-len 256 --thresholds 1,0.6,0.4 --repeats 2 --json $(RESULTS)/decode.json
	$(MEASURE) serve --json $(RESULTS)/serve.json
	$(MEASURE) ladder --hidden 512 --layers 4 --heads 4 --inner 1408 --steps 100 --repeats 2 --json $(RESULTS)/ladder.json
	$(MEASURE) start --json $(RESULTS)/start.json
	$(MEASURE) report $(RESULTS)/*.json --html build/figures.html
	$(BIN)/python -m tools.figures docs/benchmarks.md $(RESULTS)

pictures: $(READY) ## docs/images, drawn from what the scheduler plans now
	$(BIN)/python -m tools.pictures

gpu-check: ## on a machine with a GPU: tests and figures, in six minutes, nothing installed
	$(PYTHON) benchmarks/gpu_check.py

clean: ## remove everything that was made here, .venv too
	rm -rf build dist *.egg-info $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
