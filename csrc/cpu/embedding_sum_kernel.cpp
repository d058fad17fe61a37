// Embeddings that are added up: words, kinds of segments and positions, on a CPU.
//
// A task owns kEmbeddingBlock tokens. It reads a row of each table for each of them and writes
// their sum. Each sum of two rows is rounded to the type of the tables, as additions of whole
// tensors are.
//
// Floor: the bytes of the rows that are read and of out at the machine's copy rate.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cpu/kernels.h"
#include "cpu/row.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

template <class Scalar>
const Scalar* row_of(const EmbeddingTable& table, int64_t b, int64_t l) {
  const int64_t id = table.ids[b * table.id_stride[0] + l * table.id_stride[1]];
  return static_cast<const Scalar*>(table.data) + id * table.row_stride;
}

template <class Scalar>
void run(const EmbeddingSumProblem& p, int64_t block) {
  using T = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
  const int64_t first = block * kEmbeddingBlock;
  for (int64_t t = first; t < std::min(p.B * p.L, first + kEmbeddingBlock); ++t) {
    const int64_t b = t / p.L, l = t % p.L;
    Scalar* out = static_cast<Scalar*>(p.out) + t * p.N;
    const Scalar* sum = row_of<Scalar>(p.table[0], b, l);
    if (p.tables == 1) std::copy_n(sum, p.N, out);
    for (int64_t k = 1; k < p.tables; ++k) {
      const Scalar* row = row_of<Scalar>(p.table[k], b, l);
      for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
        (Strip<T>::load(sum + c, count) + Strip<T>::load(row + c, count)).store(out + c, count);
      });
      sum = out;
    }
  }
}

void run_any(const EmbeddingSumProblem& p, int64_t block) {
  switch (p.dtype) {
    case DType::Float32: return run<float>(p, block);
    case DType::BFloat16: return run<c10::BFloat16>(p, block);
    case DType::Float16: return run<c10::Half>(p, block);
    case DType::Float64: return run<double>(p, block);
  }
}

}  // namespace

EmbeddingSumKernel embedding_sum() { return {run_any}; }

}  // namespace trifuse::CPU_CAPABILITY
