"""Every file of Metal kernels passes lint, whichever kernels of it a test launches."""

import re

import pytest

from metal import host

host.require()

FOLDER = host.toolchain.HERE.parent
# In the order in which they need each other; two that give one name two meanings.
MATRICES = (
    "matrix_tiles", "activations", "epilogue", "tile_moments", "add_splits",
    "sorted_implicit_gemm", "grouped_gemm",
    "quantized_sorted", "tensor_ops", "tensor_ops_weight_grad",
    "quantized_tensor_ops", "integer_epilogue", "int8_tensor_ops",
    "quantized_sorted_int8", "add_integer_splits", "unpack_int4",
    "dense_channel", "cout16", "relation_traversal", "quantized_traversal", "depthwise",
    "fp32_atomic", "fp16_gather", "vec4", "relation_views", "table_reductions",
    "segments", "hash_table", "unique_rows", "curve_keys",
    "updates", "attention_heads",
    "points", "patches", "join_channels",
)  # fmt: skip
NORMS = ("matrix_tiles", "activations", "channel_norms")
_SIZES = re.compile(r"\b\w+Sizes\b")


def texts(files):
    """The files as one."""
    read = ((f, (FOLDER / f"{f}.metal").read_text()) for f in files)
    return "\n".join(f'#line 1 "{f}.metal"\n{text}' for f, text in read)


def lint(whole):
    """Lints a text; the structs of sizes, which a signature makes, have all."""
    fields = ", ".join(sorted(set(re.findall(r"\bsizes\.(\w+)", whole))))
    structs = "".join(
        f"struct {name} {{ int {fields}; }};\n"
        for name in sorted(set(_SIZES.findall(whole)))
    )
    return host.lint(structs + whole)


def test_all_files_are_here():
    assert {*MATRICES, *NORMS} == {p.stem for p in FOLDER.glob("*.metal")}


@pytest.mark.parametrize("backend", ("metal", "cuda"))
def test_sources_are_ascii(backend):
    """MLX hands Metal an empty source for any other character."""
    paths = list((FOLDER.parent / backend).glob("*.*"))
    assert len(paths) > 30
    for path in paths:
        assert path.read_bytes().isascii(), path.name


def test_a_character_that_is_not_ascii_is_refused():
    source = (
        "#include <metal_stdlib>\n// 3 \u00d7 3\n[[kernel]] void f(device int* a) {}"
    )
    for call in (host.lint, host.compile_source):
        with pytest.raises(host.CompileError, match="line 2 has a character that is"):
            call(source)


@pytest.mark.parametrize("files", (MATRICES, NORMS), ids=("matrices", "norms"))
def test_files(files):
    assert lint(texts(files)) == []


@pytest.mark.parametrize("files", (MATRICES, NORMS), ids=("matrices", "norms"))
def test_each_file_is_read(files):
    """A fault in each file is found once."""
    planted = re.sub(r"(?s)(#line 1 .*?)METAL_FUNC ", r"\1inline ", texts(files))
    errors = lint(planted)
    assert all("is not METAL_FUNC" in e for e in errors)
    assert sorted(e.split(".metal:")[0] for e in errors) == sorted(files)


def test_only_tensor_ops_need_a_later_metal():
    for path in FOLDER.glob("*.metal"):
        later = host.standard.in_tokens(path.read_text(), path.stem)
        assert bool(later) == (path.stem == "tensor_ops"), later


# A kernel that makes what only stands in templates, and faults planted in the files.
CALLS = """
[[kernel]] void f(
    const device half* x [[buffer(0)]], const device uint* masks [[buffer(1)]],
    device half* y [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half rows[4096], weights[4096];
  threadgroup float sums[1024];
  GemmSums<half, half, 128, false, 32, 32> matrices;
  const FragmentPlace place(lane);
  const TensorWeights<half, true> stored = {x, 64, 64};
  TensorRows<half, 64> tensors;
  half b[64];
  matrices.multiply(rows, weights, 32, 32, 255u);
  stored.read<4, false>(b, 0, 0, 0, 64, 64, place);
  tensors.multiply<4, true, true>(x, b, 0, 64, 15u, place);
  matrices.store(sums, 0);
  TileOffsets<> offsets(masks, 8, 27);
  Four<half> four;
  simdgroup_float8x8 converted;
  Matrices<bfloat, float>::load<false>(
      converted, (const threadgroup bfloat*)rows, 8);
  fetch(four, x, offsets.next(0) + int(offsets.live(0)));
  const float4 line = float4(sums[lane]);
  write_sums(y, line, 3);
}
"""


WITH_TENSORS = MATRICES[: 1 + MATRICES.index("tensor_ops")]


def test_calls_of_the_files():
    assert lint(texts(WITH_TENSORS) + CALLS) == []
