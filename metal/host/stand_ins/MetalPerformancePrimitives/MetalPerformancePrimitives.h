// As far as kernels ask it before they are rewritten: whether cooperative tensors have
// the layout of macOS 26.2, which Apple's header says by the deployment target. What it
// declares stands in shim/tensorops.h, which runs, and lint_headers/tensor_ops.h.
#pragma once
#define __TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2 \
  ((__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__) >= 260200)
