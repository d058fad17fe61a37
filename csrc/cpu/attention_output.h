// Writes the results of attention's forward: shared by its two kernels.

#pragma once

#include "cpu/attention_tile.h"

namespace trifuse::TRIFUSE_CAPABILITY {

struct HeadAndQuery {
  int64_t h, i;
};

// Writes out and logsumexp of a task's rows; place(r) returns the head and the query of row r. Bit
// r of `seen` is set if row r has a key.
template <class Scalar, class E, class Place, class T = AccumulatorOf<E>>
inline void write_rows(
    const AttentionProblem& p, const Sequence& s, const Softmax<E>& softmax, const Scale<T>& scale,
    uint64_t seen, int64_t rows, T* out, int64_t out_ld, Place place) {
  T lse[kTile];
  softmax.logsumexp(scale.unit, rows, lse);
  for (int64_t r = 0; r < rows; ++r) {
    const HeadAndQuery owner = place(r);
    const bool empty = !(seen >> r & 1);
    // A row's softmax is NaN if all its scores are -inf or one of them is +inf.
    if (!empty && !std::isfinite(lse[r])) lse[r] = std::numeric_limits<T>::quiet_NaN();
    *s.query_row<T>(p.logsumexp, owner.h, owner.i) = lse[r];
    const T inverse =
        std::isnan(lse[r]) ? lse[r] : static_cast<T>(p.dropout.scale) / softmax.row_sum[r];
    T* row = out + r * out_ld;
    // Adding 0 turns -0 into +0, so that all kernels agree.
    for (int64_t c = 0; c < p.Ev; ++c)
      row[c] = empty ? T(0) : infinite_to_nan(row[c] * inverse) + T(0);
    narrow(row, p.Ev, s.query_row<Scalar>(p.out, owner.h, owner.i), p.out.stride[3]);
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
