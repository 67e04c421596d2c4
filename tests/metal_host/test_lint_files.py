"""Every file of Metal kernels passes lint, whichever kernels of it a test launches."""

import functools
import re

import pytest

from metal import host

host.require()

FOLDER = host.toolchain.HERE.parent
# In the order in which they need each other; two that give one name two meanings.
MATRICES = (
    "matrix_tiles", "epilogue", "add_splits", "sorted_implicit_gemm", "grouped_gemm",
    "quantized_sorted", "tensor_ops", "quantized_tensor_ops", "dense_channel", "cout16",
    "relation_traversal", "quantized_traversal", "depthwise", "fp32_atomic",
    "fp16_gather", "vec4", "relation_views", "table_reductions", "segments",
    "hash_table", "unique_rows",
)  # fmt: skip
NORMS = ("matrix_tiles", "channel_norms")
_SIZES = re.compile(r"\b\w+Sizes\b")


def lint(files, change=lambda text: text):
    """Lints files as one; the structs of sizes, which a signature makes, have all."""
    texts = {f: change((FOLDER / f"{f}.metal").read_text()) for f in files}
    whole = "\n".join(f'#line 1 "{f}.metal"\n{text}' for f, text in texts.items())
    fields = ", ".join(sorted(set(re.findall(r"\bsizes\.(\w+)", whole))))
    structs = "".join(
        f"struct {name} {{ int {fields}; }};\n"
        for name in sorted(set(_SIZES.findall(whole)))
    )
    return host.lint(structs + whole)


def test_all_files_are_here():
    assert {*MATRICES, *NORMS} == {p.stem for p in FOLDER.glob("*.metal")}


@pytest.mark.parametrize("files", (MATRICES, NORMS), ids=("matrices", "norms"))
def test_files(files):
    assert lint(files) == []


@functools.cache
def planted(files):
    return lint(files, lambda text: text.replace("METAL_FUNC ", "inline ", 1))


@pytest.mark.parametrize("family", (*MATRICES, "channel_norms"))
def test_each_file_is_read(family):
    errors = planted(MATRICES if family in MATRICES else NORMS)
    assert len([e for e in errors if e.startswith(f"{family}.metal:")]) == 1
    assert all("is not METAL_FUNC" in e for e in errors)


@pytest.mark.parametrize("family", (*MATRICES, "channel_norms"))
def test_only_tensor_ops_need_a_later_metal(family):
    text = (FOLDER / f"{family}.metal").read_text()
    later = host.standard.in_tokens(text, family)
    assert bool(later) == (family == "tensor_ops"), later
