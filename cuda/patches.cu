// Slots of rows in patches along a curve, of which the last of an element is filled from
// the one before.
//
//   thread (place on the curve):  order --> row --> its element, by the first place of each
//     --> slot of a key, a second one if it fills the last patch, place of its result
//
// One launch for what takes some thirty operations of MLX. Traffic: 4 bytes a row in, 16 to
// 20 out, by rows along the curve; elements through cache.

namespace lattice {

// What is known of each element: its first place on the curve, rows of whole patches and
// their first slot, the slot and the result of the first row behind them, all rows, and
// the rows of a patch.
enum PatchWord { FIRST_PLACE, WHOLE, FIRST_SLOT, REST_SLOT, REST_RESULT, ALL, PATCH };
constexpr int PATCH_WORDS = 8;

// made, -1 before: the rows in slots, the rows of results, then of each row its slot, its
// result and, FILLING, its second slot.
template <bool FILLING>
__device__ __forceinline__ void fill_patches(const int* order, const int* elements,
                                             const int* extents, PatchesSizes sizes,
                                             int* made) {
  __shared__ int slots, results;
  if (threadIdx.x == 0) slots = extents[0], results = extents[1];
  __syncthreads();
  const int n = sizes.rows;
  int* own = made + slots;
  int* slot_of = own + results;
  int* result_of = slot_of + n;
  int* again_of = result_of + n;
  const int threads = gridDim.x * blockDim.x;
  for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += threads) {
    int low = 0, high = sizes.elements;  // the last that begins here or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (elements[middle * PATCH_WORDS + FIRST_PLACE] <= at) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int* element = elements + low * PATCH_WORDS;
    const int row = order[at], rank = at - element[FIRST_PLACE];
    const int whole = element[WHOLE], behind = rank - whole;
    const bool is_rest = behind >= 0;
    const int first = element[FIRST_SLOT] + rank;
    const int slot = is_rest ? element[REST_SLOT] + behind : first;
    const int result = is_rest ? element[REST_RESULT] + behind : first;
    made[slot] = row;
    own[result] = row;
    slot_of[row] = slot;
    result_of[row] = result;
    if (FILLING && whole > 0 && whole < element[ALL] && !is_rest &&
        rank >= element[ALL] - element[PATCH]) {
      const int again = element[REST_SLOT] + behind + element[PATCH];
      made[again] = row;
      again_of[row] = again;
    }
  }
}

}  // namespace lattice
