# Every target does its own set-up: the first call makes .venv, later ones see the stamp and are quick.
#   make demo      a real model generates the same text faster, with numbers
#   make test      all tests            (ARGS="tests/core -k tree" for some of them)
#   make test-library  those of the library alone; make test-tools: those of the commands
#   make test-avx2 those that depend on a CPU's instructions, as on one with AVX2 only
#   make test-all  the same with every combination of parameters instead of every pair, the sweep,
#                 servers, wheels and programs of others (lm-eval, TRL, DeepSpeed, Gradio, ...),
#                 which it installs
#   make test-latest  the tests with the newest release of everything but PyTorch, in .venv-latest
#                 (TORCH=latest or TORCH=2.15.0: of PyTorch, too)
#   make test-names  what recorded steps use of a PyTorch for CUDA that is not public is there, in .venv-names
#                 (TORCH=2.12.*); no GPU is needed, and 7 GB of disk
#   make sweep     every causal language model of Transformers with every strategy, and docs/guides/models.md
#   make random    1,000 random calls of generate with a strategy and without (ARGS="--count 10000")
#   make docs      the documentation site, in site/
#   make figures   its figures, and docs/tour.ipynb with its outputs
#   make dist      wheel and sdist, in dist/; make dist-check also runs the demo from each of them
#   make quality   linter, format, types and the site: exactly what CI runs
PYTHON ?= python3
VENV ?= .venv
LATEST := .venv-latest
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# The package with the extras that its tests need, and the tools of developers.
DEVELOPING = -e '.[all,serve]' --group dev
ARGS ?=

.PHONY: help venv demo test test-library test-tools test-avx2 test-all test-latest test-names sweep random docs figures dist dist-check quality clean

help:
	@sed -n '2,18s/^#\( *\)/\1/p' Makefile

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_spec needs Python 3.11 or newer; choose one with make PYTHON=python3.12")'
	@echo 'One-time set-up of $(VENV), which takes minutes: PyTorch, Transformers and the tools for development.'
	@echo 'They take 3 GB of disk with a PyTorch for CPUs; where pip chooses one for CUDA, several GB more.'
	@echo '1/3 an empty environment'
	@$(PYTHON) -m venv $(VENV)
	@echo '2/3 the latest pip (25.1 and newer know dependency groups)'
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo '3/3 about 150 packages, from PyPI or from the cache of pip'
	@quiet=; [ -t 1 ] || quiet=--quiet; $(BIN)/python -m pip install $$quiet -c constraints.txt $(DEVELOPING)
	@touch $@

demo: $(STAMP)
	@$(BIN)/hf-spec demo $(ARGS)

# As many processes as the machine has CPUs, eight at the most.
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal --durations 20 --durations-min 1

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-library: $(STAMP)
	$(PYTEST) -m "not tools" $(ARGS)

test-tools: $(STAMP)
	$(PYTEST) -m tools $(ARGS)

test-avx2: $(STAMP)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m instructions $(ARGS)

# The programs are installed beside what CI has, and stay there.
PROGRAMS = $(VENV)/.programs
$(PROGRAMS): $(STAMP)
	@echo 'lm-eval, TRL, DeepSpeed, Gradio, xgrammar, outlines, torchao: 1 GB more of packages, which takes minutes'
	@quiet=; [ -t 1 ] || quiet=--quiet; $(BIN)/python -m pip install $$quiet -c constraints.txt $(DEVELOPING) --group programs
	@touch $@

test-all: $(PROGRAMS)
	$(PYTEST) --every-case --every-architecture --environments $(ARGS)

# Each call looks for newer releases, so there is no stamp. PyTorch stays unless TORCH is given: pip may
# know it for CUDA only, which takes gigabytes.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
test-latest: VENV := $(LATEST)
test-latest:
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo '$(if $(filter-out latest,$(TORCH)),torch==$(TORCH))' > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -c $(VENV)/constraints.txt $(DEVELOPING)
	@$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|transformers|peft|tokenizers|huggingface.hub)=='
	$(PYTEST) $(ARGS)

# From PyPI, whose PyTorch for Linux is that for CUDA.
NAMES := .venv-names
test-names: VENV := $(NAMES)
test-names:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -e . pytest 'torch$(if $(filter-out latest,$(TORCH)),==$(TORCH))'
	@$(BIN)/python -c 'import torch; print(torch.__version__); assert torch.version.cuda, "a PyTorch without CUDA"'
	$(BIN)/python -m pytest -q tests/test_dependencies.py tests/target/test_captures.py -k "there or names" $(ARGS)

sweep: $(STAMP)
	$(PYTEST) -q tests/test_every_architecture.py --every-architecture --models-page

random: $(STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python tests/random_cases.py $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(STAMP)
	$(BIN)/python docs/scripts/figures.py
	$(BIN)/python docs/scripts/tour.py

dist: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build

# Into empty environments, and from an empty folder: nothing of the repository is at hand.
dist-check: dist
	@for file in dist/*.whl dist/*.tar.gz; do \
		echo "Installing $$file into an empty environment, which takes minutes"; \
		rm -rf build/check && mkdir -p build/check/work && $(PYTHON) -m venv build/check/env && \
		build/check/env/bin/pip install --quiet -c constraints.txt "$$file[cli]" && \
		(cd build/check/work && ../env/bin/hf-spec demo --limit 1 --max-new-tokens 16) || exit 1; \
	done
	rm -rf build/check

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# modeling_patches and hub_cards lie inside hf_spec once installed: mypy gets such a tree of links
	@rm -rf build/types && mkdir -p build/types/hf_spec && ln -s $(CURDIR)/hf_spec/* $(CURDIR)/modeling_patches $(CURDIR)/hub_cards build/types/hf_spec
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache
	@$(MAKE) --no-print-directory docs

clean:
	rm -rf $(VENV) $(LATEST) $(NAMES) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
