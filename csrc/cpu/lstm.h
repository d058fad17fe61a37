// One call of an LSTM, a GRU or an RNN as plain pointers, sizes and strides, for the CPU kernels.
//
// Names and rules are those of pytorch_ext/reference/lstm.py, gru.py and rnn.py. The accumulation
// type is float, or double for Float64. All tensors but the input are contiguous.

#pragma once

#include <cmath>
#include <cstdint>

#include "cell.h"
#include "dropout.h"
#include "dtype.h"

namespace trifuse {

// One direction. H is the hidden size; R is the size of h: H, or the projection's. G is the number
// of gates: 4 (i, f, g, o), 3 in a coupled LSTM (i, g, o), 3 in a GRU (r, z, n), 1 in an RNN (h).
struct LstmDirection {
  bool reverse = false;  // rows are read from the last step to the first

  // Matrices are in the dtype, vectors in the accumulation type; null if there is none.
  const void* weight_ih = nullptr;         // (G·H, I)
  const void* weight_hh = nullptr;         // (G·H, R)
  const void* weight_hr = nullptr;         // (R, H)
  const void* bias_ih = nullptr;           // (G·H,)
  const void* bias_hh = nullptr;           // (G·H,)
  const void* weight_peephole = nullptr;   // (3, H): i, f, o; coupled (2, H): i, o
  const void* norm_ih_weight = nullptr;    // (G·H,)
  const void* norm_hh_weight = nullptr;    // (G·H,)
  const void* norm_cell_weight = nullptr;  // (H,)
  const void* norm_cell_bias = nullptr;    // (H,)
  const void* h0 = nullptr;                // (B, R) in the dtype
  const void* c0 = nullptr;                // (B, H) in the accumulation type

  void* h_n = nullptr;  // (B, R) in the dtype; written by the forward, unless null
  void* c_n = nullptr;  // (B, H) in the accumulation type; likewise

  // Results of a training forward that its backward reads; an RNN's backward reads only the output.
  // A row of gates consists of blocks of 16 units (the last may have fewer). A block has one gate
  // after another: i, f, g, o, or i, g, o; in a GRU n, r, z and W_hn h + b_hn, or without
  // linear_before_reset r, z and n. A layer-norm LSTM saves the products that it normalises: a
  // block has the gates' rows of W_ih x, then those of W_hh h.
  void* gates = nullptr;  // (T, B, saved_gates()·H) in the dtype; with layer normalisation
                          // (T, B, 2·G·H) in the accumulation type
  void* cells = nullptr;  // (T, B, H) in the accumulation type: c_t
  // (T, B, clip_words()) words of 16 bits: bit k is set if the word's unit k was clipped. The words
  // of c come first, if c has a clip, then those of h.
  void* clipped = nullptr;

  // Backward only.
  const void* grad_h_n = nullptr;  // (B, R) in the dtype, unless LstmProblem::wide_states is set
  const void* grad_c_n = nullptr;  // (B, H) in the accumulation type
  void* grad_h0 = nullptr;         // (B, R) like grad_h_n
  void* grad_c0 = nullptr;         // (B, H) in the accumulation type
  void* grad_weight_ih = nullptr;  // matrices: like their weights
  void* grad_weight_hh = nullptr;
  void* grad_weight_hr = nullptr;
  void* grad_bias = nullptr;     // (G·H,), of bias_ih; vectors: in the accumulation type
  void* grad_bias_hh = nullptr;  // (G·H,); differs from grad_bias if n's products stay separate
  void* grad_peephole = nullptr;
  void* grad_norm_ih = nullptr;
  void* grad_norm_hh = nullptr;
  void* grad_norm_cell_weight = nullptr;
  void* grad_norm_cell_bias = nullptr;
};

struct LstmProblem {
  static constexpr int kMaxDirections = 2, kMaxGroups = 64;

  Cell cell = Cell::Lstm;
  bool relu = false;                // the activation of an RNN: relu, not tanh
  bool linear_before_reset = true;  // of a GRU: W_hn's product precedes the reset gate
  DType dtype;                      // Float32, Float64, or BFloat16 where a kernel serves it
  DType rounding = DType::Float32;  // with Float32: h is rounded to this type at every step
  int64_t T, B, I, H, R;
  int64_t directions;
  LstmDirection direction[kMaxDirections];

  // Rows are sorted by length, longest first, so that the rows with a step s come first.
  const int64_t* order;   // (B,)
  const int64_t* length;  // (B,): lengths of the rows in that order
  const int64_t* active;  // (steps,): number of rows that have step s
  const int64_t* start;   // (steps + 1,): number of tokens before step s
  int64_t steps;          // of the longest row
  // Number of groups to which rows are assigned in turn. Groups run their steps independently.
  int64_t groups = 1;

  const void* input;  // (T, B, I) in the dtype
  int64_t input_stride[3];
  void* output;  // (T, B, directions · R) in the dtype

  bool coupled = false;
  double forget_bias = 0, cell_clip, proj_clip, eps = 0;  // infinity: no clip
  bool training = false;
  double zoneout_h = 0, zoneout_c = 0;        // in inference: the weight of the old state
  Dropout draw_h, draw_c, recurrent_dropout;  // in training: drawn masks

  // Backward only.
  bool wide_states = false;           // grad_h_n and grad_h0 are in the accumulation type
  const void* grad_output = nullptr;  // (T, B, directions · R) in the dtype
  void* grad_input = nullptr;         // (T, B, I) in the dtype

  int64_t gates() const { return coupled ? 3 : gates_of(cell); }
  // Returns whether W_hn multiplies r h, so that a step's products depend on one another.
  bool resets_first() const { return cell == Cell::Gru && !linear_before_reset; }
  int64_t saved_gates() const { return cell == Cell::Gru && linear_before_reset ? 4 : gates(); }
  int64_t cell_clip_words() const { return std::isfinite(cell_clip) ? (H + 15) / 16 : 0; }
  int64_t clip_words() const {
    return cell_clip_words() + (std::isfinite(proj_clip) ? (R + 15) / 16 : 0);
  }
};

}  // namespace trifuse
