// Sums of rows of embedding tables: with their norm in inference, and for training.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "fast_path/dropout_add_layer_norm_call.h"

namespace trifuse::fast_path {

// The sum of rows of embedding tables, and its norm.
struct EmbeddingCall {
  std::vector<Tensor> ids, tables;
  bool last_is_residual;  // the last rows are added in the norm, whose sum is not rounded
  NormCall norm{};

  // Reads tables, weight, bias and eps of the norm, and last_is_residual.
  bool read_parts(PyObject* const* parts) {
    return read_tuple<Tensor>(parts[0], tables) && tables.size() >= 2 &&
        read(parts[1], norm.weight) && read(parts[2], norm.bias) && read(parts[3], norm.eps) &&
        read(parts[4], last_is_residual) && !records(norm.weight, norm.bias);
  }

  Tensor sum(size_t first, size_t count) const {
    static const auto op =
        find<Tensor(at::TensorList, at::TensorList)>("trifuse::embedding_sum", "");
    const auto part = [&](const std::vector<Tensor>& all) {
      return at::TensorList(all).slice(first, count);
    };
    return run_kernel(op, part(ids), part(tables));
  }

  Tensor run() {
    TORCH_CHECK_VALUE(ids.size() == tables.size(), "tables: expected ids for each");
    const size_t last = tables.size() - 1;
    norm.x = sum(0, last_is_residual ? last : tables.size());
    if (last_is_residual) {
      const Tensor rows = sum(last, 1);
      for (int64_t d = 0; d < 2; ++d)
        TORCH_CHECK_VALUE(
            rows.size(d) == 1 || rows.size(d) == norm.x.size(d),
            "ids: expected shapes that broadcast to ", ids[0].sizes(), "; got ", ids[last].sizes());
      norm.residual = rows.expand(norm.x.sizes());
    }
    TORCH_CHECK_VALUE(norm.fits(), "weight, bias: expected one number for each feature");
    return std::get<0>(norm.run());
  }
};

// Rows of embedding tables in training: the sum of those of all tables except the last, and those
// of the last, which the norm adds as its residual.
class EmbeddedRows : public torch::autograd::Function<EmbeddedRows> {
 public:
  // `ids` have the sum's shape, or hold one id for all rows. Rows of `paddings` get no gradient.
  static variable_list forward(
      AutogradContext* context, at::TensorList tables, const std::vector<Tensor>& ids,
      const std::vector<int64_t>& paddings) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor sum = at::embedding(tables[0], ids[0]);
    for (size_t i = 1; i + 1 < tables.size(); ++i) sum.add_(at::embedding(tables[i], ids[i]));
    const Tensor last = at::embedding(tables.back(), ids.back());
    context->save_for_backward(ids);
    c10::List<int64_t> heights;
    for (const Tensor& table : tables) heights.push_back(table.size(0));
    keep(
        *context, heights, c10::List<int64_t>(c10::ArrayRef<int64_t>(paddings)),
        sum.scalar_type() == at::kBFloat16 || sum.scalar_type() == at::kHalf);
    context->set_materialize_grads(false);
    return {sum, last};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list ids = context->get_saved_variables();
    const auto options = kept(*context);
    const auto heights = options[0].toIntVector(), paddings = options[1].toIntVector();
    const bool plain = !at::GradMode::is_enabled() && no_mode_but_autocast_applies() &&
        all_plain(grads) && all_plain(ids);
    variable_list found(ids.size() + 2);  // one for each table, for the ids and the paddings
    for (size_t i = 0; i < ids.size(); ++i) {
      const Tensor& grad = grads[i + 1 == ids.size()];
      if (!grad.defined() || !context->needs_input_grad(i)) continue;
      found[i] = plain && options[2].toBool() && heights[i] <= kLow &&
              heights[i] * ids[i].numel() <= kMost && paddings[i] < 0
          ? add_rows_by_product(grad, ids[i], heights[i])
          : at::embedding_dense_backward(
                grad, ids[i].expand(grad.sizes().slice(0, grad.dim() - 1)), heights[i], paddings[i],
                false);
    }
    return found;
  }

 private:
  // torch sorts the ids, which takes a dozen launches. For a small table, one product with a matrix
  // of zeros and ones adds up the rows, if that matrix takes no more than 32 MiB.
  static constexpr int64_t kLow = 1024, kMost = 1 << 24;

  static Tensor add_rows_by_product(const Tensor& grad, const Tensor& ids, int64_t height) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    Tensor rows = grad.reshape({-1, grad.size(-1)});
    if (ids.numel() == 1) rows = rows.sum(0, /*keepdim=*/true);
    const Tensor chosen = at::zeros({height, rows.size(0)}, rows.options());
    return at::mm(chosen.scatter_(0, ids.reshape({1, -1}), 1), rows);
  }
};

}  // namespace trifuse::fast_path
