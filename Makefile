# Every target does its own set-up from nothing and reuses what is there. `make` alone lists the targets.

PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= 2
PYTHON_TESTS ?= tests/python
# For the demo, such as --steps 2.
DEMO_OPTIONS ?=
# One more than there are cores: tests wait for children and disks. With three two cores are busy all the time.
AT_ONCE := -n $(shell expr $(JOBS) + 1) --dist worksteal
# Threads of several processes that share the cores give them up while they wait for each other.
SHARING := OMP_WAIT_POLICY=passive
GPU_PYTHON ?= $(PYTHON)
PHASE := $(CURDIR)/tools/phase.sh
# Reads torch's headers once in a build of the extension.
PRECOMPILED := CXX=$(CURDIR)/tools/precompiled_cxx.sh

VENV := .venv
NEWER_VENV := .venv-2.15
NEWER_TREE := build/newer-torch
# What .venv-2.15 and its build take on the disk beside what pip keeps, in MiB.
NEWER_NEEDED_MB := 12000
# What its build compiles kernels for, enough to see that they compile: the oldest, or for every other commit the newest.
# Empty: all of setup.py.
NEWER_ARCHITECTURES ?= $(if $(filter %0 %2 %4 %6 %8 %a %c %e,$(OFFLOAD_TEST_SEED)),8.0,12.0+PTX)

export MAX_JOBS := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
# Nothing is fetched from a model hub: every model is made from a configuration or carried by a package.
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

NATIVE := $(shell find csrc -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \)) $(shell find csrc -type d) \
	setup.py pyproject.toml torch_offload/_compat.py
FORMATTED := $(shell find csrc tests/cpp tests/gpu -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
LINTED := setup.py tools torch_offload tests examples benchmarks
RUNS := plain asan tsan
# Where random tests of C++ begin, in hexadecimal, and which third of rotating tests of Python runs: elsewhere for each
# commit. MATRIX=full tries many more seeds and runs all.
export OFFLOAD_TEST_SEED ?= $(shell git rev-parse --short=8 HEAD 2> /dev/null)
SANITIZE_plain :=
SANITIZE_asan := address,undefined
SANITIZE_tsan := thread
# One test of the fault programme each.
FAULTS := NthIo NthSystemCall NthAllocation FullDisk ChangedBytes Kill HungDisk
# One module of tests/python/fault each.
PYTHON_FAULTS := PythonSystemCall Signals DegradedSystem LimitedMemory
MODULE_PythonSystemCall := nth_system_call
MODULE_Signals := signals
MODULE_DegradedSystem := degraded_system
MODULE_LimitedMemory := limited_memory
# Of the pager, at random.
OPERATIONS ?= 1000000
# Where it is built; in build/cpp-plain it is linked with what the extension is.
FAULT_TREE ?= build/cpp-fault
FAULT_RECORDS ?= build/fault
FUZZERS := header decode product kernel
PYTHON_FUZZERS := folder text
# Per fuzzer; inputs that were worth keeping stay in build/fuzz/inputs.
FUZZ_SECONDS ?= 600

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- what a user runs

.PHONY: demo
demo: build $(VENV)/.demo ## Train a real model inside a third of its memory and compare it with the run in memory
	$(PHASE) "demo" $(VENV)/bin/python examples/demo.py $(DEMO_OPTIONS)

.PHONY: test
test: lint cpp-test python-test ## Everything: lint, tidy rules, C++ tests (plain, ASan+UBSan, TSan), Python tests

.PHONY: test-versions
test-versions: $(NEWER_VENV)/.ready ## Build with CUDA for a newer torch (2.15) in .venv-2.15; Python tests on it that may depend on it
	$(PHASE) "compile the GPU's test programs" $(MAKE) .gpu-programs
	rm -rf build/lib.* build/bdist.* $(NEWER_TREE)
	env $(PRECOMPILED) FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST="$(NEWER_ARCHITECTURES)" PATH="$(CURDIR)/$(NEWER_VENV)/bin:$$PATH" \
		$(PHASE) "build the extension with CUDA, newer torch" $(NEWER_VENV)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	rm -rf build/lib.* build/bdist.* *.egg-info
	mkdir -p $(NEWER_TREE)/tests
	cp -r pyproject.toml requirements CMakeLists.txt csrc examples benchmarks docs tools $(NEWER_TREE)/
	cp -r tests/python tests/cpp $(NEWER_TREE)/tests/
	cd $(NEWER_TREE) && PATH="$(CURDIR)/$(NEWER_VENV)/bin:$$PATH" $(CURDIR)/$(NEWER_VENV)/bin/python -c "import torch, \
	torch_offload; print('torch', torch.__version__, 'with', torch_offload.__file__); \
	_C = torch_offload._C; print('CUDA', _C.cuda_architectures); exit(None if _C.built_with_cuda else 'built without CUDA')"
	cd $(NEWER_TREE) && NEWER_TORCH=1 $(SHARING) PATH="$(CURDIR)/$(NEWER_VENV)/bin:$$PATH" $(PHASE) "Python tests, newer torch, at once" \
		$(CURDIR)/$(NEWER_VENV)/bin/python -m pytest $(AT_ONCE) -m "not alone and not any_torch" tests/python
	cd $(NEWER_TREE) && NEWER_TORCH=1 PATH="$(CURDIR)/$(NEWER_VENV)/bin:$$PATH" $(PHASE) "Python tests, newer torch, alone" \
		$(CURDIR)/$(NEWER_VENV)/bin/python -m pytest -m "alone and not any_torch" tests/python

.PHONY: gpu-test
gpu-test: .gpu-build ## On a machine with a GPU, torch 2.11+ and the toolkit, offline: build with CUDA, test kernels and whole models
	$(GPU_PYTHON) -m pytest tests/gpu

.PHONY: gpu-contact
gpu-contact: ## On such a machine, in at most 30 minutes: all that has to be seen there, in stages with files of their own
	$(GPU_PYTHON) tools/gpu_contact.py $(GPU_CONTACT_OPTIONS)

.PHONY: gpu-bundle
gpu-bundle: ## With a network: gather the packages that such a machine may lack, for Python 3.12, into build/gpu-bundle
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(foreach tag,manylinux_2_28 manylinux_2_17 manylinux2014,--platform $(tag)_x86_64) \
		--dest build/gpu-bundle --requirement requirements/gpu-bundle.txt

.PHONY: gpu-rehearsal
gpu-rehearsal: build ## Without a GPU: the stages of gpu-contact that a fake of the driver can show
	@cmake -S . -B build/cpp-plain -G Ninja > build/cpp-plain.log || { cat build/cpp-plain.log; exit 1; }
	$(PHASE) "build the rehearsal" cmake --build build/cpp-plain -j $(JOBS) --target torch_offload_driver_rehearsal
	$(VENV)/bin/python tools/gpu_contact.py --rehearsal --out build/gpu-rehearsal $(GPU_CONTACT_OPTIONS)

.PHONY: gpu-bench
gpu-bench: .gpu-build ## On such a machine: kernels against copying memory and cuBLAS, a paged 7 B model against one that fits, as JSON
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_kernels.py --json
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_training.py --json
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_codec.py --json

# ---- what a developer runs

.PHONY: build
build: $(VENV)/.extension ## Set up .venv and build the extension into the tree

.PHONY: lint
lint: $(VENV)/.ready tidy ## Tidy rules, clang-format, ruff and mypy, changing nothing
	@echo "clang-format --dry-run -Werror (csrc, tests/cpp)"
	@$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	$(VENV)/bin/ruff check $(wildcard $(LINTED))
	$(VENV)/bin/ruff format --check $(wildcard $(LINTED))
	$(PHASE) "mypy" $(VENV)/bin/mypy

.PHONY: tidy
tidy: $(VENV)/.ready ## Layering, sizes, banned calls, dead files, names in the docs
	$(PHASE) "tidy rules" $(VENV)/bin/python -m pytest tests/tidy

.PHONY: format
format: $(VENV)/.ready ## Format C++ and Python
	@$(VENV)/bin/clang-format -i $(FORMATTED)
	$(VENV)/bin/ruff check --fix --quiet $(wildcard $(LINTED)) || true
	$(VENV)/bin/ruff format $(wildcard $(LINTED))

.PHONY: cpp-test
cpp-test: $(RUNS:%=cpp-test-%) ## C++ tests, plain and under the sanitizers; the fault programme; the fuzzers for some seconds
	@$(MAKE) fault FAULT_TREE=build/cpp-plain
	@$(MAKE) .fuzz-build $(VENV)/.fuzz
	@$(PHASE) "fuzz" $(MAKE) -j $(JOBS) fuzz FUZZ_SECONDS=5

.PHONY: $(RUNS:%=cpp-test-%)
$(RUNS:%=cpp-test-%): cpp-test-%: .system
	@echo "seeds begin at $(OFFLOAD_TEST_SEED)"
	cmake -S . -B build/cpp-$* -G Ninja -DOFFLOAD_SANITIZE=$(SANITIZE_$*) \
		-DOFFLOAD_OBJECTS=$(if $(SANITIZE_$*),,$(CURDIR)/build/objects) \
		-DOFFLOAD_REQUIRE_ALL=$(if $(SANITIZE_$*),OFF,$(if $(filter 1,$(REQUIRE_ALL)),ON,OFF)) > build/cpp-$*.log || { cat build/cpp-$*.log; exit 1; }
	$(PHASE) "build C++ tests, $*" cmake --build build/cpp-$* -j $(JOBS)
	$(PHASE) "run C++ tests, $*" ctest --test-dir build/cpp-$* --output-on-failure

cpp-test-plain: build # whose objects are tested

.PHONY: operations
operations: .system ## A million operations of the pager by several threads under TSan, and all orders of a page's steps; to build/operations
	@echo "seeds begin at $(OFFLOAD_TEST_SEED)"
	@cmake -S . -B build/cpp-tsan -G Ninja -DOFFLOAD_SANITIZE=thread -DOFFLOAD_OBJECTS= > build/cpp-tsan.log || { cat build/cpp-tsan.log; exit 1; }
	$(PHASE) "build C++ tests of the pager, tsan" cmake --build build/cpp-tsan -j $(JOBS) \
		--target torch_offload_pager_tests torch_offload_base_tests
	@mkdir -p build/operations && echo "$(OFFLOAD_TEST_SEED)" > build/operations/seed
	OFFLOAD_TEST_OPERATIONS=$(OPERATIONS) $(PHASE) "operations of the pager, tsan" \
		build/cpp-tsan/tests/cpp/torch_offload_pager_tests --gtest_filter='RandomOperations.*:PageSteps.*' \
		--gtest_output=json:build/operations/tests.json
	OFFLOAD_TEST_OPERATIONS=$(OPERATIONS) $(PHASE) "operations of a shared budget, tsan" \
		build/cpp-tsan/tests/cpp/torch_offload_base_tests --gtest_filter='BudgetLedger.*'

.PHONY: fault
fault: build .fault-build ## Break memory, disk, calls and process on purpose, some 40,000 times, C++ and Python; writes what came of it to build/fault
	@mkdir -p $(FAULT_RECORDS) && echo "$(OFFLOAD_TEST_SEED)" > $(FAULT_RECORDS)/seed
	@echo "seeds begin at $(OFFLOAD_TEST_SEED)"
	@$(PHASE) "faults on purpose" $(MAKE) -j $(JOBS) $(FAULTS:%=.fault-%) $(PYTHON_FAULTS:%=.fault-%)

.PHONY: fault-long
fault-long: ## The same with every N and many more seeds, two hours; build/fault-long
	MATRIX=full $(MAKE) fault FAULT_RECORDS=build/fault-long

.PHONY: $(FAULTS:%=.fault-%)
$(FAULTS:%=.fault-%): .fault-%:
	@$(FAULT_TREE)/tests/cpp/fault/torch_offload_fault_tests --gtest_filter=Fault.$* \
		--gtest_output=json:$(FAULT_RECORDS)/$*.json > $(FAULT_RECORDS)/$*.log 2>&1 || { tail -n 60 $(FAULT_RECORDS)/$*.log; exit 1; }
	@grep -h "ms total)" $(FAULT_RECORDS)/$*.log | tail -n 1 | sed "s/.*ran\./$*:/"

.PHONY: $(PYTHON_FAULTS:%=.fault-%)
$(PYTHON_FAULTS:%=.fault-%): .fault-%:
	@PYTHONPATH=$(CURDIR):$(CURDIR)/tests/python $(VENV)/bin/python -m fault.$(MODULE_$*) $(FAULT_RECORDS)/$*.json \
		> $(FAULT_RECORDS)/$*.log 2>&1 || { tail -n 60 $(FAULT_RECORDS)/$*.log; exit 1; }
	@tail -n 1 $(FAULT_RECORDS)/$*.log

.PHONY: .fault-build
.fault-build: .system
	@$(PHASE) "system packages" tools/system_packages.sh $(PYTHON) fault
	@cmake -S . -B $(FAULT_TREE) -G Ninja > $(FAULT_TREE).log || { cat $(FAULT_TREE).log; exit 1; }
	$(PHASE) "build the fault programme" cmake --build $(FAULT_TREE) -j $(JOBS) --target torch_offload_fault_tests

.PHONY: fuzz
fuzz: $(FUZZERS:%=fuzz-%) $(PYTHON_FUZZERS:%=fuzz-%) ## Fuzz what reads coded extents, folders of them and texts, each fuzzer for FUZZ_SECONDS (600)

.PHONY: $(FUZZERS:%=fuzz-%)
$(FUZZERS:%=fuzz-%): fuzz-%: .fuzz-build
	@mkdir -p build/fuzz/inputs/$*
	@build/fuzz/tests/cpp/fuzz/$*_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=12288 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/$*- build/fuzz/inputs/$* build/fuzz/seeds > build/fuzz/$*.log 2>&1 || \
		{ tail -n 60 build/fuzz/$*.log; exit 1; }
	@grep -H number_of_executed_units build/fuzz/$*.log

.PHONY: $(PYTHON_FUZZERS:%=fuzz-%)
$(PYTHON_FUZZERS:%=fuzz-%): fuzz-%: build $(VENV)/.fuzz
	@mkdir -p build/fuzz/inputs/$*
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests/python $(VENV)/bin/python tests/python/fuzz/$*_fuzz.py \
		-max_total_time=$(FUZZ_SECONDS) -max_len=12288 -len_control=0 -keep_seed=1 -timeout=60 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/$*- build/fuzz/inputs/$* > build/fuzz/$*.log 2>&1 || \
		{ tail -n 60 build/fuzz/$*.log; exit 1; }
	@grep -H number_of_executed_units build/fuzz/$*.log

.PHONY: python-test
python-test: build $(VENV)/.demo ## Python tests on the torch in .venv
	$(SHARING) $(PHASE) "Python tests, at once" $(VENV)/bin/python -m pytest $(AT_ONCE) -m "not alone" $(PYTHON_TESTS)
	$(PHASE) "Python tests, alone" $(VENV)/bin/python -m pytest -m alone $(PYTHON_TESTS)

# Tests that go through most of the extension, for a build of it that checks itself: CHECKS=undefined or address.
CHECKED_TESTS := $(addprefix tests/python/,$(addsuffix .py,runtime/test_deferred runtime/test_deferred_timing \
	runtime/test_wrap runtime/test_refusals runtime/test_raw_access activations/test_paging))
CHECKS ?= undefined
CHECKED := build/$(CHECKS)
RUN_CHECKED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(CHECKED) UBSAN_OPTIONS=print_stacktrace=1
ifeq ($(CHECKS),address)
# Comes first, leaves faults to the engine and what torch never frees to the system.
RUN_CHECKED += LD_PRELOAD=$(shell g++ -print-file-name=libasan.so) \
	ASAN_OPTIONS=handle_segv=0:allow_user_segv_handler=1:detect_leaks=0
endif

.PHONY: sanitized-extension
sanitized-extension: build $(VENV)/.demo ## Python tests of the core on a build of the extension with UBSan (CHECKS=address: ASan)
	$(PRECOMPILED) OFFLOAD_SANITIZE=$(CHECKS) \
		$(PHASE) "build the extension, $(CHECKS)" $(VENV)/bin/python setup.py --quiet build --build-lib $(CHECKED)
	$(RUN_CHECKED) $(VENV)/bin/python -c "import torch_offload; found = torch_offload.__file__; print('testing', found); \
		exit(None if found.startswith('$(CURDIR)/$(CHECKED)/') else 'which is not the one with checks')"
	$(RUN_CHECKED) $(SHARING) $(PHASE) "Python tests, $(CHECKS), at once" \
		$(VENV)/bin/python -m pytest $(AT_ONCE) -m "not alone" $(CHECKED_TESTS)
	$(RUN_CHECKED) $(PHASE) "Python tests, $(CHECKS), alone" $(VENV)/bin/python -m pytest -m alone $(CHECKED_TESTS)

WHEEL_VENV := build/wheel-venv
# A folder on a disk, since scratch files of pages are refused in memory, and outside of the tree's own imports.
WHEEL_RUNS := build/wheel-runs

.PHONY: wheel-test
wheel-test: build ## Build the wheel, install it in an environment of its own and use it outside of the tree
	rm -rf dist $(WHEEL_RUNS) $(WHEEL_VENV) build/lib.* build/bdist.*
	$(PRECOMPILED) $(PHASE) "build the wheel" $(VENV)/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	rm -rf build/lib.* build/bdist.*
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(PHASE) "install the wheel's torch" $(WHEEL_VENV)/bin/pip install --quiet torch==$(TORCH) pytest
	$(PHASE) "install the wheel" $(WHEEL_VENV)/bin/pip install --quiet "$$(ls $(CURDIR)/dist/*.whl)[report]"
	mkdir -p $(WHEEL_RUNS)
	cd $(WHEEL_RUNS) && cp $(CURDIR)/tests/wheel/test_wheel.py . && \
		$(PHASE) "wheel tests" $(CURDIR)/$(WHEEL_VENV)/bin/python -m pytest --basetemp=runs --rootdir=. -p no:cacheprovider test_wheel.py

.PHONY: clean
clean: ## Remove what was built; the environments stay
	rm -rf build dist *.egg-info demo-output demo-report.json torch_offload/_build_info.py torch_offload/*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.extension

# ---- set-up

# What tests/gpu runs without torch is compiled where there is a toolkit and no GPU, so that it still can be there.
.PHONY: .gpu-programs
.gpu-programs:
	for program in tests/gpu/*.cu; do \
		$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc -std=c++20 -arch=sm_90 -Icsrc -Itests/cpp -c $$program -o /dev/null || exit 1; \
	done

# Builds into the tree with the torch that is there, for the GPU that is there. Fetches nothing.
.PHONY: .gpu-build
.gpu-build:
	@$(GPU_PYTHON) tools/gpu_machine.py > /dev/null
	FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST="$$($(GPU_PYTHON) tools/gpu_machine.py)" MAX_JOBS="$$(nproc)" \
		$(GPU_PYTHON) setup.py --quiet build_ext --inplace

.PHONY: .fuzz-build
.fuzz-build: .system
	@$(PHASE) "system packages" tools/system_packages.sh $(PYTHON) fuzz
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DOFFLOAD_FUZZ=ON -DOFFLOAD_SANITIZE=address,undefined \
		-DOFFLOAD_TEST_LAYERS= > build/fuzz.log || { cat build/fuzz.log; exit 1; }
	$(PHASE) "build fuzzers" cmake --build build/fuzz -j $(JOBS) --target write_seeds $(FUZZERS:%=%_fuzz)
	@build/fuzz/tests/cpp/fuzz/write_seeds build/fuzz/seeds

.PHONY: .system
.system:
	@mkdir -p build
	@$(PHASE) "system packages" tools/system_packages.sh $(PYTHON)

$(VENV)/.ready: requirements/test.txt | .system
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip show --quiet torch 2> build/pip-show.log || \
		$(PHASE) "install torch" $(VENV)/bin/pip install --quiet torch==$(TORCH)
	$(PHASE) "install what tests need" $(VENV)/bin/pip install --quiet -r requirements/test.txt
	touch $@

$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.ready
	@$(PHASE) "install atheris" $(VENV)/bin/pip install --quiet --only-binary :all: -r requirements/fuzz.txt || { echo "fuzz-folder and fuzz-text need atheris, which \
	pip cannot install for $$($(VENV)/bin/python --version). Make $(VENV) anew with a Python that it has a wheel for, 3.11 \
	to 3.14 (make PYTHON=python3.12); the other fuzzers work without it: make $(FUZZERS:%=fuzz-%)" >&2; exit 1; }
	touch $@

$(VENV)/.demo: requirements/demo.txt $(VENV)/.ready
	$(PHASE) "install what the demo needs" $(VENV)/bin/pip install --quiet --no-deps -r requirements/demo.txt
	touch $@

# Also depends on the torch that is there, so that another one put into .venv means a new build.
$(VENV)/.extension: $(VENV)/.ready $(NATIVE) $(wildcard $(VENV)/lib/python3*/site-packages/torch/version.py)
	$(PRECOMPILED) $(PHASE) "build the extension" $(VENV)/bin/pip install --quiet --no-build-isolation --no-deps --editable . || { rm -f $@; exit 1; }
	touch $@

$(NEWER_VENV)/.ready: requirements/newer-torch.txt requirements/test.txt requirements/demo.txt | .system
	test -x $(NEWER_VENV)/bin/python || $(PYTHON) -m venv $(NEWER_VENV)
	$(NEWER_VENV)/bin/pip show --quiet torch 2> build/pip-show.log || tools/free_space.sh . $(NEWER_NEEDED_MB)
	$(PHASE) "install newer torch" $(NEWER_VENV)/bin/pip install --quiet -r requirements/newer-torch.txt -r requirements/test.txt
	$(NEWER_VENV)/bin/pip install --quiet --no-deps -r requirements/demo.txt
	touch $@
