// One call of an LSTM or a GRU as plain pointers, sizes and strides: what a kernel is told.
//
// Names and rules are those of pytorch_ext/reference/lstm.py and gru.py. The accumulation type is
// float, or double for Float64. Tensors are contiguous but for the input.

#pragma once

#include <cmath>
#include <cstdint>

#include "dropout.h"
#include "dtype.h"

namespace trifuse {

enum class Cell { Lstm, Gru };

// One direction. H is the hidden size, R what h has: H, or the projection's. G is 4 (i, f, g, o),
// in a coupled LSTM 3 (i, g, o), in a GRU 3 (r, z, n).
struct LstmDirection {
  bool reverse = false;  // rows are read from their ends

  // Matrices in the dtype, vectors in the accumulation type; null where there is none.
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
  void* c_n = nullptr;  // (B, H) in the accumulation type; so too

  // What a training forward leaves to its backward. A row of gates is made of blocks of 16 units
  // (the last may have fewer), each gate's beside one another: i, f, g, o, or i, g, o; in a GRU n,
  // r, z and W_hn h + b_hn. A layer-norm LSTM leaves what it normalises: W_ih x in those blocks,
  // and after them W_hh h.
  void* gates = nullptr;  // (T, B, G·H), in a GRU (T, B, 4·H), in the dtype; with layer
                          // normalisation (T, B, 2·G·H) in the accumulation type
  void* cells = nullptr;  // (T, B, H) in the accumulation type: c_t
  // (T, B, clip_words()) of 16 bits: bit k of a word says that its unit k was clipped. The first
  // words are c's, if that is clipped, the others h's.
  void* clipped = nullptr;

  // Backward only.
  const void* grad_h_n = nullptr;  // (B, R) in the dtype
  const void* grad_c_n = nullptr;  // (B, H) in the accumulation type
  void* grad_h0 = nullptr;         // (B, R) in the dtype
  void* grad_c0 = nullptr;         // (B, H) in the accumulation type
  void* grad_weight_ih = nullptr;  // matrices like what they belong to
  void* grad_weight_hh = nullptr;
  void* grad_weight_hr = nullptr;
  void* grad_bias = nullptr;       // (G·H,), of bias_ih; vectors in the accumulation type
  void* grad_bias_hh = nullptr;    // (G·H,), in a GRU, where it is another
  void* grad_peephole = nullptr;
  void* grad_norm_ih = nullptr;
  void* grad_norm_hh = nullptr;
  void* grad_norm_cell_weight = nullptr;
  void* grad_norm_cell_bias = nullptr;
};

struct LstmProblem {
  static constexpr int kMaxDirections = 2, kMaxGroups = 64;

  Cell cell = Cell::Lstm;
  DType dtype;                      // Float32, Float64, or BFloat16 where a kernel serves it
  DType rounding = DType::Float32;  // with Float32: h is rounded to this type at every step
  int64_t T, B, I, H, R;
  int64_t directions;
  LstmDirection direction[kMaxDirections];

  // Rows in the order of their lengths, longest first: those that have a step s come first.
  const int64_t* order;   // (B,)
  const int64_t* length;  // (B,), of the rows in that order
  const int64_t* active;  // (steps,): how many rows have step s
  const int64_t* start;   // (steps + 1,): how many tokens come before those of step s
  int64_t steps;          // of the longest row
  // Rows dealt out in turn to so many groups, which go through their steps apart from one another.
  int64_t groups = 1;

  const void* input;        // (T, B, I) in the dtype
  int64_t input_stride[3];
  void* output;             // (T, B, directions · R) in the dtype

  bool coupled = false;
  double forget_bias = 0, cell_clip, proj_clip, eps = 0;  // infinity: no clip
  bool training = false;
  double zoneout_h = 0, zoneout_c = 0;        // outside of training: how much of the old stays
  Dropout draw_h, draw_c, recurrent_dropout;  // in training: what zoneout and dropout draw

  // Backward only.
  const void* grad_output = nullptr;  // (T, B, directions · R) in the dtype
  void* grad_input = nullptr;         // (T, B, I) in the dtype

  int64_t gates() const { return cell == Cell::Gru || coupled ? 3 : 4; }
  int64_t cell_clip_words() const { return std::isfinite(cell_clip) ? (H + 15) / 16 : 0; }
  int64_t clip_words() const {
    return cell_clip_words() + (std::isfinite(proj_clip) ? (R + 15) / 16 : 0);
  }
};

}  // namespace trifuse
