"""Lint refuses what TensorOps do not have: a planted fault of each."""

import re

import pytest
from linted import findings

from metal import host

host.require()

PLACE = re.compile(r"kernel\.metal:(\d+): error: ")
GUARD = '#if !__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2\n#error "layout"\n#endif\n'
INCLUDE = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
TENSORS = """
  using namespace mpp::tensor_ops;
  constexpr auto descriptor = matmul2d_descriptor(
      16, 32, 16, false, false, true, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, metal::execution_simdgroup> product;
  auto left = product.get_left_input_cooperative_tensor<half, half, float>();
  auto right = product.get_right_input_cooperative_tensor<half, half, float>();
  auto sums = product.get_destination_cooperative_tensor<
      remove_addrspace_t<decltype(left)>, remove_addrspace_t<decltype(right)>, float>();
  for (int j = 0; j < 8; ++j) left[j] = half(a[j]);
  product.run(left, right, sums);
  o[i] = sums[0];
"""
PLANTED_TENSORS = {
    "an operand's type as decltype gives it": (
        "remove_addrspace_t<decltype(left)>",
        "decltype(left)",
        "take remove_addrspace_t",
    ),
    "a product of two types": (
        "right_input_cooperative_tensor<half, half",
        "right_input_cooperative_tensor<half, bfloat",
        "does not multiply these types",
    ),
    "a size that is not there": ("16, 32, 16", "16, 24, 16", "are 16 or 32"),
    "no size of 32": ("16, 32, 16", "16, 16, 16", "one of the sizes"),
    "a device pointer as an operand": (
        "run(left, right, sums)",
        "run(a, right, sums)",
        "no matching",
    ),
    "a loop over what a lane has": ("j < 8", "j < n", "'left' is indexed by 'j'"),
}


def test_tensor_ops():
    assert findings(INCLUDE + GUARD, TENSORS) == []


@pytest.mark.parametrize("name", PLANTED_TENSORS)
def test_faults_of_tensor_ops(name):
    old, new, reason = PLANTED_TENSORS[name]
    assert TENSORS.count(old) == 1
    errors = findings(INCLUDE + GUARD, TENSORS.replace(old, new))
    assert any(reason in e for e in errors) and PLACE.match(errors[0]), errors


def test_tensor_ops_of_another_layout():
    (error,) = findings(INCLUDE, TENSORS)
    assert "another layout" in error and error.startswith("kernel.metal:3:")
    with pytest.raises(host.CompileError, match="layout"):
        host.compile.preprocess(INCLUDE + GUARD, deployment_target=260199)
