// Layer normalisation of an LSTM's products and cells: statistics of rows whose units are spread
// over panels, and the gradient of a normalised value.
//
// Each panel yields the sum of its part of a row, and the sum of squares about that part's mean.
// They are combined panel by panel (Chan, Golub and LeVeque, 1979).

#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/lstm_units.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// Sets moments[k] to the sum and the squares of row k of a panel's blocks, for `count` rows.
template <class T>
inline void take_moments(
    const T* rows, int64_t ld, int64_t count, int64_t blocks, int64_t units, T (*moments)[2]) {
  using U = Units<T>;
  for (int64_t k = 0; k < count; ++k) {
    U sum(T(0)), squares(T(0));
    for (int64_t b = 0; b < blocks; ++b) sum = sum + U::load(rows + k * ld + b * kUnits, units);
    const T total = sum.total();
    const U mean(total / static_cast<T>(blocks * units));
    const uint64_t existing = low_bits(units);
    for (int64_t b = 0; b < blocks; ++b) {
      const U x = choose(existing, U::load(rows + k * ld + b * kUnits) - mean, U(T(0)));
      squares = multiply_add(x, x, squares);
    }
    moments[k][0] = total;
    moments[k][1] = squares.total();
  }
}

template <class T>
struct Statistics {
  T mean, rstd;
  Units<T> normalise(const Units<T>& x) const { return (x - Units<T>(mean)) * Units<T>(rstd); }
};

// Computes the statistics of `count` rows of blocks · H values. Panel q's moments start at moments
// + q * stride.
template <class T>
inline void combine_moments(
    const LstmProblem& p, const T (*moments)[2], int64_t stride, int64_t count, int64_t blocks,
    Statistics<T>* statistics) {
  const int64_t panels = (p.H + kUnits - 1) / kUnits;
  const T size = static_cast<T>(blocks * p.H);
  for (int64_t k = 0; k < count; ++k) {
    T sum = 0, squares = 0;
    for (int64_t q = 0; q < panels; ++q) sum += moments[q * stride + k][0];
    const T mean = sum / size;
    for (int64_t q = 0; q < panels; ++q) {
      const T part = static_cast<T>(blocks * units_of(p, q));
      const T off = moments[q * stride + k][0] / part - mean;
      squares += moments[q * stride + k][1] + part * off * off;
    }
    statistics[k] = {mean, T(1) / std::sqrt(squares / size + static_cast<T>(p.eps))};
  }
}

// Returns the gradient of the values before normalisation, from g, the gradient of the normalised
// values n, and the means over the row of g and g · n.
template <class T>
inline Units<T> normalise_backward(
    const Units<T>& g, const Units<T>& n, T rstd, T mean, T product_mean) {
  using U = Units<T>;
  return (g - U(mean) - n * U(product_mean)) * U(rstd);
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
