// torch.ops.trifuse.embedding_sum: tensors in, tensors out. For inference: it has no derivative.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

namespace trifuse {
namespace {

// Checks a table (rows, N) and its ids, and returns how the kernel reads them. `sizes` (B, L) are
// those of all ids, which may be broadcast to them.
EmbeddingTable read_table(
    const Tensor& ids, const Tensor& table, at::IntArrayRef sizes, const Tensor& first) {
  check_memory("ids", ids);
  check_memory("tables", table);
  check_type("ids", ids, at::kLong, first);
  check_type("tables", table, first.scalar_type(), first);
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.size(1) == first.size(1) &&
          (table.size(1) <= 1 || table.stride(1) == 1),
      "tables: expected shapes (rows, ", first.size(1), ") with contiguous rows; got ",
      table.sizes(), " with strides ", table.strides());
  TORCH_CHECK_VALUE(
      ids.dim() == 2 && (ids.size(0) == sizes[0] || ids.size(0) == 1) &&
          (ids.size(1) == sizes[1] || ids.size(1) == 1),
      "ids: expected shapes that broadcast to ", sizes, "; got ", ids.sizes());
  EmbeddingTable result{};
  result.data = table.const_data_ptr();
  result.row_stride = table.stride(0);
  result.ids = ids.const_data_ptr<int64_t>();
  for (int64_t d = 0; d < 2; ++d) result.id_stride[d] = ids.size(d) == 1 ? 0 : ids.stride(d);
  return result;
}

// Checks that each id names a row of its table.
void check_ids(const EmbeddingTable& table, const Tensor& ids, int64_t rows) {
  for (int64_t b = 0; b < ids.size(0); ++b) {
    for (int64_t l = 0; l < ids.size(1); ++l) {
      const int64_t id = table.ids[b * table.id_stride[0] + l * table.id_stride[1]];
      TORCH_CHECK_INDEX(
          id >= 0 && id < rows, "ids: expected numbers from 0 to ", rows - 1, "; got ", id);
    }
  }
}

// Args: ids[k] int64, (B, L) or broadcast to it; tables[k] (rows, N). Returns (B, L, N).
Tensor embedding_sum(at::TensorList ids, at::TensorList tables) {
  TORCH_CHECK_VALUE(
      !ids.empty() && ids.size() == tables.size() &&
          static_cast<int64_t>(ids.size()) <= kMostTables,
      "tables: expected 1 to ", kMostTables, ", and ids for each; got ", tables.size(), " and ",
      ids.size());
  const Tensor& first = tables[0];
  TORCH_CHECK_VALUE(
      first.dim() == 2 && ids[0].dim() == 2, "ids, tables: expected 2 dimensions each; got shapes ",
      ids[0].sizes(), " and ", first.sizes());
  EmbeddingSumProblem p{};
  p.dtype = kernel_type(first.scalar_type());
  p.B = ids[0].size(0);
  p.L = ids[0].size(1);
  p.N = first.size(1);
  p.tables = static_cast<int64_t>(tables.size());
  for (size_t k = 0; k < tables.size(); ++k)
    p.table[k] = read_table(ids[k], tables[k], ids[0].sizes(), first);
  // Allocated before any id is read, because a few ids may be expanded to more than memory can
  // hold.
  const Tensor out = empty({p.B, p.L, p.N}, first.options());
  p.out = out.mutable_data_ptr();
  if (out.numel() == 0) return out;  // reads no row
  for (size_t k = 0; k < tables.size(); ++k) check_ids(p.table[k], ids[k], tables[k].size(0));
  const auto run = kernels().embedding_sum.run;
  parallel_tasks(
      (p.B * p.L + kEmbeddingBlock - 1) / kEmbeddingBlock, 1,
      static_cast<double>(2 * p.tables * out.numel()), [&](int64_t block) { run(p, block); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("embedding_sum", embedding_sum); }

}  // namespace trifuse
