SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON := .venv/bin/python
# programs that a test or the demo starts (uv, kubectl) are those of the environment
export PATH := $(CURDIR)/.venv/bin:$(PATH)
.PHONY: demo test check gen bench e2e image soak down env

env: .venv/.synced  ## the Python environment: every tool and library of the tests and the demo

.venv/.synced: requirements/dev.txt pyproject.toml requirements/ensure-uv
	uv=$$(requirements/ensure-uv); \
	$$uv venv --quiet --allow-existing --python 3.11 .venv; \
	$$uv pip sync --quiet --python $(PYTHON) requirements/dev.txt; \
	$$uv pip install --quiet --python $(PYTHON) --no-deps --editable .; \
	[ $$uv -ef .venv/bin/uv ] || ln -sf $$uv .venv/bin/uv
	touch $@

demo: env  ## from nothing to a refit on a real Kubernetes, explained on the way
	$(PYTHON) -m e2e.demo

test: check  ## everything that CI runs
	$(PYTHON) -m pytest tests e2e/stories -m "not soak"

check: env  ## lint, format, types, architecture, generated files
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTHON) -m refit_api.crd --check

gen: env  ## everything that is generated and committed
	$(PYTHON) -m refit_api.crd
	proto/generate
	uv pip compile --quiet pyproject.toml --all-extras --group dev --group engine --no-header --no-annotate -c requirements/dev.txt -o requirements/dev.txt
	for extra in operator runtime; do uv pip compile --quiet pyproject.toml --extra $$extra --no-header --no-annotate -c requirements/dev.txt -o requirements/$$extra.txt; done
	uv pip compile --quiet pyproject.toml --extra runtime --group engine --no-header --no-annotate -c requirements/dev.txt -o requirements/engine.txt

bench: env  ## the numbers of docs/performance.md
	$(PYTHON) -m bench

e2e: env  ## the stories on the local cluster
	$(PYTHON) -m pytest e2e/stories -m "not soak"

image: env  ## the operator's and the runtime's image
	$(PYTHON) -m e2e.cluster image

soak: env  ## long lists, many seeds, kill loops; REFIT_SOAK=SEED for other kills
	$(PYTHON) -m bench soak

down: env  ## ends the local cluster; caches and system packages stay
	$(PYTHON) -m e2e.cluster down
