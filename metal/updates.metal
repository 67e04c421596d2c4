// An optimizer's step for several parameters in one launch.
//
//   work (threadgroups, 3): parameter, first element, last element + 1
//   threadgroup --> elements of one parameter: (gradient, parameter, state) -> the same
//
// With a master, a float32 copy, that is updated and the parameter is it rounded; where the
// parameter is another number, somebody has set it since, and it is taken in its place.
// Read once and written once, neighbouring elements by neighbouring threads; float32
// inside, rounded to the dtype at the end. The launch's switch picks the arrays of a
// threadgroup's parameter. It pays wherever parameters are many and short: MLX launches
// every term of the formula for each.

// What the host says of a step: `rates`, in this order.
enum SgdRate { SGD_RATE, SGD_DECAY, SGD_MOMENTUM, SGD_GAIN };
enum AdamRate {
  ADAM_RATE, ADAM_KEPT, ADAM_SCALE, ADAM_FIRST, ADAM_FIRST_GAIN, ADAM_SECOND,
  ADAM_SECOND_GAIN, ADAM_EPS
};
enum UpdateRule { SGD_PLAIN, SGD_MOVED, SGD_NESTEROV, ADAM };

// One element: the new parameter; the state is changed.
template <int RULE>
METAL_FUNC float updated(
    const device float* rates, float gradient, float parameter, thread float& first,
    thread float& second) {
  if (RULE == ADAM) {
    first = rates[ADAM_FIRST] * first + rates[ADAM_FIRST_GAIN] * gradient;
    second = rates[ADAM_SECOND] * second + rates[ADAM_SECOND_GAIN] * gradient * gradient;
    const float below = sqrt(second) * rates[ADAM_SCALE] + rates[ADAM_EPS];
    return rates[ADAM_KEPT] * parameter - rates[ADAM_RATE] * first / below;
  }
  float by = gradient + rates[SGD_DECAY] * parameter;
  if (RULE != SGD_PLAIN) {
    first = rates[SGD_MOMENTUM] * first + rates[SGD_GAIN] * by;
    by = RULE == SGD_NESTEROV ? by + rates[SGD_MOMENTUM] * first : first;
  }
  return parameter - rates[SGD_RATE] * by;
}

// COUNT: parameters of the launch, so that each number of them has a kernel. Any of
// master, first and second may be null.
template <typename T, typename STATE, int RULE, int COUNT>
METAL_FUNC void update_parameters(
    const device int* work, const device T* gradient, const device T* parameter,
    const device STATE* master, const device STATE* first, const device STATE* second,
    const device float* rates, device T* next, device STATE* next_master,
    device STATE* next_first, device STATE* next_second, uint3 group, uint3 at,
    uint3 threads) {
  const int begin = work[3 * group.x + 1], stop = work[3 * group.x + 2];
  for (int i = begin + int(at.x); i < stop; i += int(threads.x)) {
    float a = first ? float(first[i]) : 0.0f, b = second ? float(second[i]) : 0.0f;
    const float own = float(parameter[i]);
    float from = own;
    if (master) {
      from = float(master[i]);
      if (float(T(from)) != own) from = own;
    }
    const float to = updated<RULE>(rates, float(gradient[i]), from, a, b);
    next[i] = T(to);
    if (master) next_master[i] = STATE(to);
    if (first) next_first[i] = STATE(a);
    if (second) next_second[i] = STATE(b);
  }
}
