// MLX's lazy graph as data: what is not evaluated yet, what it reads, and what else holds it.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"

namespace lattice {
namespace mx = mlx::core;

// An array of the graph. Inputs and siblings are places in the order of discovery.
struct GraphNode {
  std::string primitive;  // its name; empty where the array is evaluated
  mx::Shape shape;
  int64_t itemsize;
  std::vector<int> inputs, siblings;
  int known;                      // of the inputs, in MLX's graph: a custom function computes the rest itself, in order
  int position = 0;               // among the outputs of its primitive
  int stream = -1;                // where the primitive runs
  bool gpu = false;
  std::vector<int64_t> state;     // of a view's primitive: its axes, or the strides of a slice; of a custom function
                                  // which of its inputs its results are
  bool evaluated;
  uintptr_t data = 0;             // which buffer an evaluated array has; 0 of none
  int64_t data_bytes = 0;         // of the whole buffer, as the allocator counts it
  int64_t data_size = 0;          // elements that the array spans
  mx::Strides strides;
  bool contiguous = true, row_contiguous = true, column_contiguous = true;
};

// What changes of a node while others are added.
struct GraphHolders {
  std::vector<int> arrays;  // references to each node from outside of the known graph
  std::vector<int> data;    // references to its buffer from outside of the known arrays
  std::vector<int> evaluated;  // nodes that have been evaluated since they were found
};

class Graph {
 public:
  // Finds what the roots read, down to what is evaluated, and returns the places of the roots.
  std::vector<int> add(const std::vector<mx::array>& roots);
  int size() const { return int(arrays_.size()); }
  GraphNode node(int at) const;
  GraphHolders holders() const;

 private:
  template <class Each>
  void each_input(const mx::array& a, Each each) const;

  std::vector<mx::array> arrays_;  // held, so that no other array gets the same identity
  std::vector<bool> was_lazy_;
  std::unordered_map<uintptr_t, int> places_;
  std::unordered_map<uintptr_t, std::vector<mx::array>> launched_;  // by custom functions
};

// Whether MLX follows the operations of this thread: for gradients, vmap, compile or an export.
bool is_transforming();

// Whether a gradient may be asked for, as MLX's attention says: on CUDA it then keeps a second result, on Metal it is
// several operations. So it is on a CPU at any time, where every transformation may ask for one.
bool is_differentiating();

// The first of the arrays that one primitive computes, of each: MLX computes the others with it, and of each that it is
// asked for it looks through all of them.
std::vector<mx::array> one_of_each(const std::vector<mx::array>& arrays);

// An array whose evaluation raises: features in a dry run, whose sizes are known and whose values nothing may read.
mx::array withheld(const mx::array& a);

}  // namespace lattice
