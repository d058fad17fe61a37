// Runs forward passes on torch's threads, for the ops of single operators and of whole layers.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <cstdint>
#include <optional>

#include "attention_tensors.h"
#include "cpu/capability.h"
#include "cpu/linear.h"
#include "dropout_add_layer_norm.h"

namespace trifuse {

// attention.cpp: fills in out (B, H, Lq, Ev) and logsumexp (B, H, Lq).
void run_attention(const AttentionArguments&, const Tensor& out, const Tensor& logsumexp);

// dropout_add_layer_norm.cpp: fills in `blocks` and `rows_per_block` of a forward problem, sets
// `stream` if the result exceeds the caches, and runs it.
void run_dropout_add_layer_norm(DropoutAddLayerNormProblem&);

// linear.cpp: fills in `rows_per_task`, `columns_per_task` and `streams` of problems, and
// runs all of them at once. They must have one type.
void run_linear(LinearProblem* problems, int64_t count);

// The same for problems without a packed weight, which have one number of rows. Below the kernel's
// `few_rows` rows, the weight is read as it is stored, by rows or by columns.
void run_linear_unpacked(LinearProblem* problems, int64_t count);

// Checks that `packed` is a weight (N, K) with the problem's sizes and type, in the layout that an
// instruction set reads.
void check_packed(
    const LinearProblem&, const Tensor& packed, at::ScalarType dtype,
    Capability in_use = capability());

// linear.cpp: returns the activation with a name, and None without a name. Throws for an unknown
// name.
Activation activation_of(std::optional<c10::string_view> name);

}  // namespace trifuse
