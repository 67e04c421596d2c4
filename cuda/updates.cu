// An optimizer's step for many parameters in one launch.
//
//   work (blocks, 3): parameter, first element, last element + 1
//   block --> ELEMENTS of one parameter: (gradient, parameter, state) -> (parameter, state)
//
// With a master, a float32 copy, that is updated and the parameter is it rounded; where the
// parameter is another number, somebody has set it since, and it is taken in its place.
// Read once and written once, 16 bytes at a time; float32 inside, rounded to the dtype at
// the end. The launch's switch picks the arrays of a block's parameter, the same for all of
// its threads. It pays wherever parameters are many and short: MLX launches every term of
// the formula for each. Reads alignment.cuh, channels.cuh too.

namespace lattice {

// What the host says of a step: `rates`, in this order.
enum SgdRate { SGD_RATE, SGD_DECAY, SGD_MOMENTUM, SGD_GAIN };
enum AdamRate {
  ADAM_RATE, ADAM_KEPT, ADAM_SCALE, ADAM_FIRST, ADAM_FIRST_GAIN, ADAM_SECOND,
  ADAM_SECOND_GAIN, ADAM_EPS
};
enum UpdateRule { SGD_PLAIN, SGD_MOVED, SGD_NESTEROV, ADAM };

// One element: the new parameter; the state is changed.
template <int RULE>
__device__ __forceinline__ float updated(const float* rates, float gradient,
                                         float parameter, float& first, float& second) {
  if constexpr (RULE == ADAM) {
    first = rates[ADAM_FIRST] * first + rates[ADAM_FIRST_GAIN] * gradient;
    second = rates[ADAM_SECOND] * second + rates[ADAM_SECOND_GAIN] * gradient * gradient;
    const float below = sqrtf(second) * rates[ADAM_SCALE] + rates[ADAM_EPS];
    return rates[ADAM_KEPT] * parameter - rates[ADAM_RATE] * first / below;
  }
  float by = gradient + rates[SGD_DECAY] * parameter;
  if constexpr (RULE != SGD_PLAIN) {
    first = rates[SGD_MOMENTUM] * first + rates[SGD_GAIN] * by;
    by = RULE == SGD_NESTEROV ? by + rates[SGD_MOMENTUM] * first : first;
  }
  return parameter - rates[SGD_RATE] * by;
}

// COUNT: parameters of the launch, so that each number of them has a kernel. Any of
// master, first and second may be null.
template <typename T, typename STATE, int RULE, int COUNT>
__device__ __forceinline__ void update_parameters(const int* work, const T* gradient,
                                                  const T* parameter,
                                                  const STATE* master,
                                                  const STATE* first,
                                                  const STATE* second,
                                                  const float* rates, T* next,
                                                  STATE* next_master, STATE* next_first,
                                                  STATE* next_second) {
  constexpr int WIDE = 16 / sizeof(T);
  const int start = work[3 * blockIdx.x + 1], stop = work[3 * blockIdx.x + 2];
  // Updates as many neighbouring elements from `at` on as g has.
  auto update = [&](int at, auto g, auto aligned) {
    constexpr int EACH = sizeof(g.v) / sizeof(T);
    Channels<STATE, EACH> m, a = {}, b = {};
    g = load_channels<EACH>(gradient + at, aligned);
    const auto p = load_channels<EACH>(parameter + at, aligned);
    if (master) m = load_channels<EACH>(master + at, aligned);
    if (first) a = load_channels<EACH>(first + at, aligned);
    if (second) b = load_channels<EACH>(second + at, aligned);
    float to[EACH], to_first[EACH], to_second[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      to_first[j] = static_cast<float>(a.v[j]), to_second[j] = static_cast<float>(b.v[j]);
      const float own = static_cast<float>(p.v[j]);
      float from = own;
      if (master) {
        from = static_cast<float>(m.v[j]);
        if (static_cast<float>(static_cast<T>(from)) != own) from = own;
      }
      to[j] = updated<RULE>(rates, static_cast<float>(g.v[j]), from, to_first[j],
                            to_second[j]);
    }
    store_channels<EACH>(next + at, to);
    if (master) store_channels<EACH>(next_master + at, to);
    if (first) store_channels<EACH>(next_first + at, to_first);
    if (second) store_channels<EACH>(next_second + at, to_second);
  };
  const int whole = stop - (stop - start) % WIDE, thread = threadIdx.x;
  auto run = [&](auto aligned) {
    for (int at = start + thread * WIDE; at < whole; at += (int)blockDim.x * WIDE) {
      update(at, Channels<T, WIDE>{}, aligned);
    }
  };
  const auto any = reinterpret_cast<const STATE*>(parameter);
  by_alignment(run, gradient, parameter, master ? master : any, first ? first : any,
               second ? second : any);
  if (whole + thread < stop) {
    update(whole + thread, Channels<T, 1>{}, cuda::std::false_type());
  }
}

}  // namespace lattice
