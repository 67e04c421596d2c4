# `make demo` and `make test` set everything up themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The backend of MLX's wheel on Linux: cpu, or cuda for `make test-cuda BACKEND=cuda`.
BACKEND ?= $(shell [ "$$(uname -s)" = Linux ] && echo cpu)
COMMA := ,
# Processes that tests are run in: neighbours share one, and so their compiled kernels.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Scans whose surfaces the demo's second net learns; without any, a made-up room's.
SCANS ?= $(wildcard $(addprefix ../shared/data/,small_gicp_target.ply pcl_room_scan1.pcd lpm_cloud_0.vtk))

.PHONY: demo test test-metal test-cuda test-cuda-sanitize test-sanitize check-arm64 check-dist dist bench-cpu docs lint types format clean

demo: $(VENV)/.installed
	$(BIN)/mlx-lattice demo --out demo
	$(BIN)/python examples/train_segmenter.py $(SCANS) --steps 90 --schemes --out demo/surfaces

test: $(VENV)/.installed
	$(PYTEST)

# What runs on every backend that is here, the emulated one too, by itself.
EVERYWHERE := routes/test_table.py routes/test_integers.py routes/test_epilogue.py routes/test_moments.py routes/test_proof.py routes/test_proof_kept.py routes/test_proof_refusals.py routes/test_tile_shapes.py routes/test_benchmark.py routes/test_plan_is_the_launch.py routes/test_plan_is_the_cuda_launch.py ops/test_channel_norms.py geometry/test_builders.py geometry/test_reduction_kernels.py inspect/test_doctor.py
# Tests of files, commands and the docs' code, whose results do not depend on routes.
FILES := inspect/test_docs.py inspect/test_docstrings.py io/test_cli.py io/test_convert.py io/test_hostile_files.py io/test_integer_files.py io/test_io.py io/test_pytorch_files.py io/test_values_that_are_not_finite.py nn/test_decode.py nn/test_evaluate.py nn/test_scans.py nn/test_segment.py nn/test_view.py

# The whole suite with the Metal routes, their kernels run on the CPU (needs clang); without
# what `make test` runs on them anyway, and what no route changes.
test-metal: $(VENV)/.installed
	MLX_LATTICE_METAL=host $(PYTEST) --ignore=tests/metal_host --ignore=tests/distribution -m 'not native' $(addprefix --ignore=tests/,$(EVERYWHERE) $(FILES)) --ignore-glob='tests/*/test_cpu*' --ignore-glob='tests/*/test_cuda*' --ignore-glob='tests/*/test_metal*'

# The same suite on an NVIDIA GPU, with BACKEND=cuda, on all cores.
test-cuda: $(VENV)/.installed
	$(BIN)/python -c "import sys, mlx.core as mx; sys.exit(None if mx.cuda.is_available() else 'MLX finds no NVIDIA GPU; where there is one: make clean, then make test-cuda BACKEND=cuda')"
	MLX_ENABLE_TF32=0 $(BIN)/python -m pytest -n auto --dist worksteal --ignore=tests/metal_host --ignore-glob='tests/*/test_cpu*' --ignore-glob='tests/*/test_metal*'

# Every CUDA kernel family once, small, under compute-sanitizer of the CUDA toolkit.
test-cuda-sanitize: $(VENV)/.installed
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/sanitize/cuda_kernels.py
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python tests/sanitize/cuda_kernels.py

# The native kernels under the address, undefined and thread sanitizers (Linux, GCC).
test-sanitize: $(VENV)/.installed
	$(BIN)/python tests/sanitize/run.py address,undefined
	$(BIN)/python tests/sanitize/run.py thread

# The native kernels compiled for 64-bit Arm and run under an emulator (Linux).
check-arm64: $(VENV)/.installed
	$(BIN)/python tests/arm64/run.py

# The sdist, the wheel for this machine and the pure one, into dist/.
dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	MLX_LATTICE_PURE=1 $(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python tests/distribution/check.py dist/*

# The sdist and the pure wheel from it: what is in them, and the README run without a compiler.
check-dist: $(VENV)/.installed
	rm -rf build/dist
	MLX_LATTICE_PURE=1 $(BIN)/python -m build --outdir build/dist
	$(BIN)/python tests/distribution/check.py build/dist/*.tar.gz
	$(BIN)/python tests/distribution/check.py --install build/dist/*.whl

# The peers' cases beside NumPy's matmul; ARGS="--help" lists the options.
bench-cpu: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py $(ARGS)

# The site, into site/; nothing is fetched, and a warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/budget.py

# Types: pyright and mypy on what users write, and how many public names have one.
types: $(VENV)/.installed
	$(BIN)/python .ci/check_types.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An editable install: Python changes are live; it runs again when the build changes.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard cpu/*)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'mlx_lattice needs Python 3.10 or newer: make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip uninstall -qq --yes mlx-lattice  # a checkout's name once, and another project's
	@echo "Installing what is needed, and compiling the C++ kernels: about three minutes on two cores"
	$(BIN)/python -m pip install --quiet --editable ".[$(addsuffix $(COMMA),$(BACKEND))dev]"
	touch $@

clean:
	rm -rf $(VENV) build demo site .pytest_cache .ruff_cache .hypothesis
