// The model's settings and counters, as C functions. Each library that tests build has a copy.

#include "grid.h"

extern "C" __attribute__((visibility("default"))) void set_device(
    int multiprocessors, int blocks_per_multiprocessor, size_t shared_memory, uint64_t seed,
    int compute_capability) {
  cuda_on_host::device = {
      multiprocessors, blocks_per_multiprocessor, shared_memory, seed, compute_capability};
}

extern "C" __attribute__((visibility("default"))) int launches(const char* kernel) {
  return cuda_on_host::launches[kernel];
}
