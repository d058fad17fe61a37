// The dropout parameters of a kernel, as specified in pytorch_ext/reference/philox.py.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

// Where the elements of a call lie in a larger call of which it is a part, such as one process's
// part of a batch. The elements draw the random numbers that they would draw there. Units are what
// an operator numbers in order: planes of attention, rows of the norm and of recurrent layers, and
// elements of standalone dropout.
struct Place {
  // Runs of `block` units lie `stride` units apart, the first at `offset`. In each run the units
  // from `fold` on lie `jump` further. block = 0: the call is the whole.
  int64_t offset = 0, block = 0, stride = 0, fold = 0, jump = 0;
  int64_t row = 0, column = 0;  // of attention's first query and key; column: a multiple of 8

  constexpr int64_t unit(int64_t i) const {
    if (!block) return i;
    const int64_t rest = i % block;
    return offset + i / block * stride + rest + (rest >= fold ? jump : 0);
  }

  // Reads the place from a seed of kSeedAndPlace numbers, in which it follows the seed itself.
  static constexpr Place read(const int64_t* seed) {
    return {seed[1], seed[2], seed[3], seed[4], seed[5], seed[6], seed[7]};
  }
};
constexpr int64_t kSeedAndPlace = 8;

struct Dropout {
  uint32_t threshold = 0;  // number of 16-bit values that drop an element; 0: no dropout
  double scale = 1;        // of the kept elements
  uint64_t seed = 0;
  Place place;
};

// One call of standalone dropout. Elements are numbered in order: element i takes the random bits
// of row i / kLongRow and column i % kLongRow of Philox's plane 0.
constexpr int64_t kLongRow = int64_t(1) << 30;
struct DropoutProblem {
  DType dtype;
  int64_t count;
  const void* x;
  void* out;
  Dropout dropout;
};

}  // namespace trifuse
