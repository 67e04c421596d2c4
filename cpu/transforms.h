// What MLX's transformations do with this thread's operations, which MLX's Python does not say.
#pragma once
#include <vector>

#include "mlx/mlx.h"

namespace lattice {
namespace mx = mlx::core;

// Whether MLX traces the operations of this thread: for gradients, vmap, compile or an export.
bool is_transforming();

// Whether a gradient may be asked for. MLX's attention answers it on a GPU: for gradients it returns a second result
// (CUDA) or is composed of several operations (Metal). On a CPU every transformation may ask for a gradient.
bool is_differentiating();

// The first array of each primitive that computes several. MLX computes the others with it, and would search all of
// them for each one that it is asked for.
std::vector<mx::array> one_of_each(const std::vector<mx::array>& arrays);

}  // namespace lattice
