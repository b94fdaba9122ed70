# The distribution's commands. `make help` lists them.
PYTHON ?= python3
PROFILE ?= auto
PORT ?= 30000
MODEL ?=
ARGS ?=
SUITE ?= default
TARGET ?= cuda
RECORD ?=

# pipefail: otherwise a failing `git ls-files` lints nothing and reports success.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help

.PHONY: help install serve test lint linters kernels wheel dev lock check image image-test clean

SERVE = -m tools.serve --port "$(PORT)" $(if $(MODEL),--model-path "$(MODEL)") $(ARGS)

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make .venv: the profile (PROFILE=cpu|cuda), our kernels and the patched SGLang
	@$(PYTHON) -m tools.environment --profile $(PROFILE)

serve: ## serve the demo model, or MODEL=...; ARGS="..." go to sglang.launch_server, PORT=30000
	@$(PYTHON) $(SERVE) --check
	@$(PYTHON) -m tools.environment --profile $(PROFILE)
	@.venv/bin/python $(SERVE)

test: ## run all tests that this host can run (SUITE=unit|e2e|... for one suite)
	@$(PYTHON) test/run_suite.py --suite $(SUITE) --check
	@$(PYTHON) -m tools.environment --profile $(PROFILE) --extra test
	@.venv/bin/python test/run_suite.py --suite $(SUITE)

lint: ## run all linters: ruff, mypy, clang-format, shellcheck, hadolint and the patch rules
	@$(PYTHON) -m tools.environment --profile $(PROFILE) --extra test
	@$(MAKE) --no-print-directory linters

linters: ## the linters alone, on an existing .venv; the pre-commit hook runs this
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@git ls-files '*.h' '*.cuh' '*.cu' '*.cc' | xargs .venv/bin/clang-format --dry-run --Werror
	@git ls-files '*.sh' .ci/run | xargs .venv/bin/shellcheck --severity=warning
	@.venv/bin/hadolint docker/Dockerfile
	@.venv/bin/python -m tools.patchset check

kernels: ## compile our kernels for sm_90, sm_100 and sm_120; report registers, spills, shared memory, SASS
	@$(PYTHON) -m tools.environment --profile $(PROFILE) --extra test
	@.venv/bin/python -m tools.kernels

check: ## check patches and pins against the pinned upstream wheels
	@$(PYTHON) -m tools.patchset check

wheel: ## build dist/sglang-*.whl for this Python
	@$(PYTHON) -m tools.patchset build dist

dev: ## assemble build/dev with our files as links: PYTHONPATH=build/dev runs what you edit
	@$(PYTHON) -m tools.patchset dev

image: ## build the container image TARGET=cuda|cpu with buildah, as root (docker/README.md)
	@$(PYTHON) -m tools.image.build $(TARGET) $(if $(RECORD),--record $(RECORD))

image-test: ## build the cpu image from scratch, serve from it and check it (as root, 15 GB of disk)
	@$(PYTHON) -m tools.environment --profile $(PROFILE) --extra test
	@.venv/bin/python test/run_suite.py --suite image

# Build and test tools share an environment with the CPU profile, so they must agree with its versions.
lock: ## write requirements/*.lock from requirements/*.in
	@for name in cpu build test cuda-toolkit cuda image; do \
	  uv pip compile requirements/$$name.in --generate-hashes $$([ $$name = cpu ] && echo --no-deps) \
	    $$([[ $$name =~ ^(build|test)$$ ]] && echo --constraint requirements/cpu.in) \
	    $$([ $$name = cuda ] && echo --no-emit-package sglang) --python-version 3.11 \
	    --python-platform $$([ $$name = cuda ] && echo x86_64-manylinux_2_36 || echo x86_64-unknown-linux-gnu) \
	    -q --no-annotate --no-header \
	    -o requirements/$$name.lock || exit 1; \
	done

clean: ## remove build/, dist/ and .venv
	rm -rf build dist .venv
