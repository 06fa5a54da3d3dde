# `make demo` and `make test` need only Python and make; they set up .venv.
PYTHON ?= python3
BIN := .venv/bin

# With this variable every process of every test would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-serving test-sanitize test-gpu test-vllm-gpu bench-vllm bench bench-kernels bench-models bench-systems bench-parallel check docs setup \
	table clean

setup: .venv/ready

# torch is installed first, so that a CPU build, where pip offers one, is not replaced by a later requirement.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/semisparse demo

# One process per core and one thread per process. Tests that share costly models run in one process (loadgroup).
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --ignore tests/docs

# Every CUDA kernel compiled for every architecture and in every variant that its source declares, the CUDA emulator's own
# instructions, older CPUs, the demo. Needs no GPU.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m slow

# Tests against the real vLLM (its Python code only: linear layers need none of its kernels), lm-eval and GPTQModel, and the pages
# in docs/. Their environment also finds the packages of .venv; make test has compressed-tensors.
SERVING := .venv-serving
VLLM := 0.33.0
VLLM_BUILD := 'setuptools>=78.1.1,<81' setuptools_scm setuptools_rust wheel packaging jinja2
test-serving: $(SERVING)/ready
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -n auto --dist loadgroup -m '' tests/vllm \
		tests/evaluate/test_tasks.py tests/docs tests/integrations/test_gptqmodel.py

$(SERVING)/ready: .venv/ready tests/serving-requirements.txt
	$(BIN)/python -m venv --clear $(SERVING)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > \
		$$($(SERVING)/bin/python -c "import site; print(site.getsitepackages()[0])")/behind.pth
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check $(VLLM_BUILD)
	BUILD_CUDA_EXT=0 $(SERVING)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/serving-requirements.txt
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) $(SERVING)/bin/pip install --quiet \
		--disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm vllm==$(VLLM)
	touch $@

# The C++ kernels built with AddressSanitizer and UBSan, over the formats' tests on a CPU, the faults and the fuzz.
CXX ?= c++
test-sanitize: setup
	SEMISPARSE_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest tests/formats tests/fuzz tests/cli/test_faults.py tests/cli/test_hostile.py \
		tests/runtime/test_scalars.py -k 'not early and not late and not cuda and not shared_memory'

# The tests of every CUDA and Triton kernel but those under the emulator, which test-slow runs; 186 s on an H200. One CPU thread per
# process: 16 processes of 16 threads had not ended after 440 s. SANITIZE=memcheck, racecheck, initcheck or synccheck runs only
# the tests that launch each kernel on a few inputs, under compute-sanitizer; all tests would take hours. racecheck crashes inside
# cuBLAS, so kernels that call it are left out; initcheck has to see what every kernel writes (docs/experiments/sanitizers.md);
# CUDA graphs need torch's allocator, which is off under a sanitizer.
SANITIZE ?=
sanitizer = $(if $(SANITIZE),PYTORCH_NO_CUDA_MEMORY_CACHING=1 SEMISPARSE_DRAWS=8 SEMISPARSE_SEED=$(shell date +%s) \
	$(if $(filter racecheck,$(SANITIZE)),SEMISPARSE_RACECHECK=1) compute-sanitizer --tool $(SANITIZE) \
	--report-api-errors no --error-exitcode 9 $(if $(filter initcheck,$(SANITIZE)),,--kernel-name kernel_substring=semisparse))
gpu_tests = $(if $(SANITIZE),tests/formats/test_fresh_inputs.py tests/formats/test_fusion.py tests/formats/test_experts.py \
	tests/engine/test_ops.py tests/engine/test_permuted.py tests/compress/prune/test_sweep_triton.py tests/compress/prune/test_rounding_triton.py tests/quant \
	tests/formats/slide24/test_lift.py::test_the_triton_form_gives_the_same \
	tests/formats/slide24/test_cusparselt.py::test_the_pass_after_a_gemm,\
	tests/test_gpu.py tests/test_two_gpus.py tests/api/test_start.py tests/integrations/test_cuda_graphs.py tests/engine tests/formats tests/nn/test_joined_experts.py tests/quant \
	tests/cuda_emulator) \
	tests/runtime/test_kernel.py tests/runtime/test_quantise_rows.py
racecheck_fails = blas or pack_mm or scaled_mm or reference
select = not cpu and not early and not late$(if $(SANITIZE), and not captured)$(if $(filter racecheck,$(SANITIZE)), and not ($(racecheck_fails)))
test-gpu: setup
	OMP_NUM_THREADS=1 $(sanitizer) $(BIN)/python -m pytest -m '' $(gpu_tests) -k '$(select)' $(if $(SANITIZE),,-n auto --dist load --maxschedchunk 1)

# vLLM's engine on a GPU, in an environment that holds vLLM, semisparse and pytest-xdist; eight engines share the GPU.
VLLM_PYTHON ?= python3
vllm := VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
test-vllm-gpu:
	$(vllm) OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 $(VLLM_PYTHON) -m pytest -n 8 -rA tests/vllm/test_gpu.py tests/vllm/test_two_gpus.py

# Thirteen engines start side by side, then eight processes, four of them servers, then two, then thirteen, nine of them servers: 16
# cores, one H200, 18 minutes. Rows are added to vllm.csv, vllm-busy.csv, vllm-serve.csv and vllm-kernels.csv.
bench-vllm:
	$(vllm) OMP_NUM_THREADS=2 $(VLLM_PYTHON) benchmarks/vllm_speed.py $(OUT)/vllm.csv --cache 32 \
		--profile dense,bitmask-unfused,gqs-w4s50-unfused,bitmask,gqs-w4s50 --entries $(vllm_first)+$(vllm_then)+$(vllm_copies)+$(vllm_small) \
		--busy $(subst $(empty) ,$(comma),$(addprefix qwen2.5-1.5b/,dense bitmask gqs-w4s50 $(vllm_rest)))
comma := ,
vllm_qwen := qwen2.5-1.5b/dense,qwen2.5-1.5b/int4,qwen2.5-1.5b/bitmask,qwen2.5-1.5b/gqs-w4s50
vllm_rest := slide24-2:4-int8 bitmask-w4 vector_nm slide24-6:8-int8
vllm_small := $(subst $(empty) ,$(comma),$(addprefix qwen2.5-1.5b/,$(vllm_rest) fp8 \
	$(addsuffix @serve,dense bitmask gqs-w4s50 fp8 int4 $(vllm_rest))))
vllm_first := dense,bitmask,gqs-w4s50,int4,fp8,slide24-2:4-int8,bitmask-unfused,gqs-w4s50-unfused,gqs-w4s50-unfused-few-splits,$(vllm_qwen)
vllm_copies := bitmask-keep-dense,qwen2.5-1.5b/bitmask-keep-dense
vllm_then := dense@serve,int4@serve,bitmask@serve,gqs-w4s50@serve,bitmask-w4,slide24-6:8-int8,vector_nm,gqs-dense-w4

# The files of results/h200, measured on this machine's GPU; `bench-parallel` needs two.
OUT ?= results/here
LARGE = 28672,8192
GPU ?= h200
bench: bench-kernels bench-models bench-systems

bench-kernels: setup
	$(BIN)/semisparse bench machine --out $(OUT)/machine.csv
	$(BIN)/python benchmarks/host.py $(OUT)/host.csv
	$(BIN)/semisparse bench kernels --dtype float16 --formats dense,bitmask,gqs,ec_csr,vector_nm \
		--shapes llama2-7b,$(LARGE) --tokens 1,8,16 --out $(OUT)/kernels-float16.csv
	$(BIN)/semisparse bench kernels --formats dense,bitmask,gqs,vector_nm --shapes llama2-7b,$(LARGE) \
		--tokens 64,256,1024,4096 --out $(OUT)/kernels-bfloat16.csv
	$(BIN)/semisparse bench kernels --dtype float32 --formats bitmask,vector_nm --shapes llama2-7b --tokens 512,2048 \
		--out $(OUT)/kernels-float32.csv

bench-models: setup
	$(BIN)/semisparse bench model --arch llama2-7b --format dense,bitmask,gqs,ec_csr,vector_nm,slide24 --out $(OUT)/model.csv

bench-systems: setup
	$(BIN)/python benchmarks/slide24.py $(OUT)/slide24-int8.csv --gpu $(GPU) --seconds 0.04 --kinds int8
	$(BIN)/python benchmarks/slide24.py $(OUT)/slide24-fp8-bfloat16.csv --gpu $(GPU) --seconds 0.04 \
		--kinds fp8,bf16 --patterns 2:4,6:8,8:10 --tokens 2048,4096,8192
	$(BIN)/python benchmarks/slide24.py $(OUT)/slide24-square.csv --gpu $(GPU) --seconds 0.02 --kinds int8 \
		--square 1024,2048,4096,8192,16384
	$(BIN)/python benchmarks/slide24.py $(OUT)/slide24-many.csv --gpu $(GPU) --seconds 0.02 --kinds int8 \
		--tokens 16384,32768,65536
	$(BIN)/python benchmarks/gqs_decode.py $(OUT)/gqs-decode.csv
	$(BIN)/python benchmarks/vector_nm.py products $(OUT)/vector_nm-float32.csv
	$(BIN)/python benchmarks/vector_nm.py products $(OUT)/vector_nm-bfloat16.csv --dtype bfloat16 --tokens 64,512,2048,4096
	$(BIN)/python benchmarks/vector_nm.py ablation $(OUT)/vector_nm-ablation.csv
	$(BIN)/python benchmarks/vector_nm.py decode $(OUT)/vector_nm-decode.csv
	$(BIN)/python benchmarks/ec_csr_speed.py decode $(OUT)/ec_csr-decode.csv
	$(BIN)/python benchmarks/ec_csr_speed.py decode $(OUT)/ec_csr-decode-float32.csv --dtype float32 --zeros 70
	$(BIN)/python benchmarks/ec_csr_speed.py ablation $(OUT)/ec_csr-ablation.csv
	$(BIN)/python benchmarks/ec_csr_speed.py extraction $(OUT)/ec_csr-extraction.csv

bench-parallel: setup
	$(BIN)/torchrun --nproc-per-node 2 -m semisparse.cli bench parallel --arch llama2-13b --dtype float16 \
		--formats bitmask,gqs,ec_csr,vector_nm,slide24 --out $(OUT)/parallel.csv

# Loss and KL of each pruner on the models and texts of a folder. Rows that the CSV already has are not measured again.
SHARED ?= ../shared
table: setup
	$(BIN)/python benchmarks/quality.py $(SHARED) results/pruners.csv pruners
	$(BIN)/python benchmarks/tables.py

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python benchmarks/tables.py --check
	$(site)

# The documentation site, in build/site; a broken link fails. The variable silences advertising for its successor.
site = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
docs: setup
	$(site)

clean:
	rm -rf .venv $(SERVING)
