// The LSTM, the GRU and the RNN on a GPU: a call as plain pointers and sizes, and its launchers. A
// call is one layer in one or two directions, or some layers of a stack of LSTMs. Either way it has
// D chains. A chain is one direction or one layer, with its own weights and state, and runs its
// steps one by one.
//
// Names and rules are those of pytorch_ext/reference/lstm.py, gru.py and rnn.py. The caller
// computes the products over all tokens: those of the input and those of the weights' gradients. In
// the step-by-step mode it also computes the two products of each step. All pointers are device
// pointers; tensors are contiguous.
//
// The G gates of a unit lie side by side, so that one thread owns all of them: i, f, g, o in an
// LSTM, and a single one in an RNN. In a coupled LSTM, where f is 1 - i, the weights and gradients
// of f are zeros. A GRU has r, z, n in the products with W_ih, and r, z, k in those with W_hh. A
// GRU and an RNN have none of the options, and R = H for them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "../cell.h"
#include "../dtype.h"

namespace trifuse::cuda {

struct Lstm {
  static constexpr int kMaxChains = 4;
  // First index of a vector's gradient in `vector_grads`: three vectors for the peepholes of i, f
  // and o; with layer norm also four each for the bias and both products' gains, and two for the
  // weight and bias of c's norm.
  enum VectorGradient {
    kGradPeephole = 0,
    kGradBias = 3,
    kGradNormIh = 7,
    kGradNormHh = 11,
    kGradNormCell = 15,
    kVectorGradients = 17
  };

  DType dtype;  // vectors and c are in the accumulation type: float32, or float64 for Float64
  Cell cell;
  int64_t T, B, H, R;  // R: the size of h
  int64_t chains;      // D
  // Whether the chains are layers, each reading the output of the one before; otherwise they are
  // directions. Tensors that are (T, B, D, ...) below are (D, T, B, ...) for layers.
  bool layers;
  bool reverse[kMaxChains];
  bool coupled, projected, training;
  double cell_clip, proj_clip, eps;  // infinity: no clip
  double zoneout_h, zoneout_c;
  uint32_t threshold_h, threshold_c;  // of zoneout in training, as in Dropout
  const int64_t* seed;                // or null if nothing is drawn
  bool placed;                        // whether a Place follows the seed
  const int64_t* lengths;             // (B,), or null: all rows have T steps

  // Null if the call has none.
  const void* bias;              // (D, H, G): both biases and the forget bias; in a GRU (D, H, 4):
                                 // both for r and for z, b_ih of n, b_hh of k
  const void* peephole;          // (D, 3, H): i, f, o
  const void* norm_ih;           // (D, H, 4)
  const void* norm_hh;           // (D, H, 4)
  const void* norm_cell_weight;  // (D, H)
  const void* norm_cell_bias;    // (D, H)
  const void* dropout;           // (D, B, R): multipliers of h in the products with W_hh

  void* workspace;  // lstm_workspace bytes, or null if that is 0

  // Over all steps. The backward overwrites from_input with its gradient. It reads from_input first
  // with layer norm, or if gates were not saved; without layer norm from_input then holds the
  // preactivations without the bias.
  void* from_input;  // (T, B, D, H, G): W_ih x
  void* output;      // (T, B, D, R); the backward of an RNN reads it
  void* gates;       // (D, T, B, H, 4), or 3 if coupled: i, g, o; in a GRU r, z, n, k; or null:
                     // not saved
  void* cells;       // (D, T, B, H): c_t; null if not saved
  bool* clipped;     // (D, T, B, clipped_columns()): H of c, if it has a clip, then R of h; or null

  // Forward: the state between steps.
  void* h;          // (D, B, R)
  void* h_dropped;  // (D, B, R): h after recurrent dropout; null without it
  void* c;          // (D, B, H)

  // Backward.
  const void* grad_output;  // (T, B, D, R)
  const void* c0;           // (D, B, H)
  void* grad_h;             // (D, B, R), in the accumulation type; without the part through W_hh
  void* grad_c;             // (D, B, H)
  // (T, B, D, H, G): with layer norm, W_hh h, which is replaced by its gradient; in a GRU, that
  // gradient.
  void* from_hidden;
  // (D, vector_grad_runs(), B, kVectorGradients, H) or, without layer norm, (D, ..., 3, H): the
  // part of each row in the gradients of vectors, with one sum for each run of kVectorGradRun
  // steps, to which the backward adds; null if none are needed.
  void* vector_grads;
  const void* h_before;  // (D, T, B, H), in a GRU: h before each step
  void* m;               // (D, T, B, H), with a projection: receives m, for W_hr's gradient

  bool relu;  // the activation of an RNN: relu, not tanh
  // Whether a GRU's reset gate precedes the product with W_hn. Its `gates` are r, z, n, and both
  // products have the gradient in from_input.
  bool reset_first;

  // Returns G.
  constexpr int gates_per_unit() const { return static_cast<int>(gates_of(cell)); }
  static constexpr bool clips(double limit) {
    return limit < std::numeric_limits<double>::infinity();
  }
  constexpr int64_t clipped_columns() const {
    return (clips(cell_clip) ? H : 0) + (clips(proj_clip) ? R : 0);
  }
  constexpr int vector_grad_count() const {
    return norm_hh ? int(kVectorGradients) : int(kGradBias);
  }
  // A sum over all steps of a long sequence would lose too much precision by rounding.
  static constexpr int64_t kVectorGradRun = 32;
  constexpr int64_t vector_grad_runs() const { return (T + kVectorGradRun - 1) / kVectorGradRun; }
};

// `stream` is a cudaStream_t. Each function that takes one throws std::runtime_error if a kernel
// can't be launched.

// Writes the multipliers of recurrent dropout, (D, B, R).
void lstm_dropout(
    const Lstm& call, void* multipliers, uint32_t threshold, double scale, void* stream);

// Step by step ------------------------------------------------------------------------------------

// Returns the bytes of workspace that a call needs. With layer norm a block owns a whole row, which
// may not fit in shared memory. Reads only the dtype, the sizes and norm_hh.
int64_t lstm_workspace(const Lstm& call);

// Computes step `step` except for its products. `from_hidden`, (D, B, H, G), is W_hh h. `m`,
// (D, B, H), receives m if a projection follows. Outputs past a row's length are not written.
void lstm_forward_step(
    const Lstm& call, int64_t step, const void* from_hidden, void* m, void* stream);

// Finishes a step that has a projection. `projected`, (D, B, R), is W_hr m.
void lstm_forward_projection(const Lstm& call, int64_t step, const void* projected, void* stream);

// Computes the backward of a step. `dh_or_dm` is the gradient of h through the next step's product,
// (D, B, R), or with a projection the gradient of m, (D, B, H). `da`, (D, B, H, G), receives the
// gradient of W_hh h. Past a row's length only `da` is written, with zeros.
void lstm_backward_step(
    const Lstm& call, int64_t step, const void* dh_or_dm, void* da, void* stream);

// With a projection, runs before lstm_backward_step: writes the gradient of W_hr m, from that of h,
// to `dq`, (D, B, R), and to `grad_projected`, (D, T, B, R). `dh_recurrent`, (D, B, R), is the
// gradient of h through the next step's product.
void lstm_backward_projection(
    const Lstm& call, int64_t step, const void* dh_recurrent, void* dq, void* grad_projected,
    void* stream);

// The same for a step of a GRU or an RNN. `dh_recurrent`, (D, B, H), is the gradient of h through
// the next step's product.
void gru_forward_step(const Lstm& call, int64_t step, const void* from_hidden, void* stream);
void gru_backward_step(
    const Lstm& call, int64_t step, const void* dh_recurrent, void* da, void* stream);

// A step of a GRU whose reset gate comes first is two launches, each after a product.
// Forward: from W_hh h of r and z, `from_hidden`, (D, B, H, 2), the first writes r h to `reset_h`,
// (D, B, H); the second reads W_hn (r h), `from_reset_h`, (D, B, H).
void gru_forward_reset(
    const Lstm& call, int64_t step, const void* from_hidden, void* reset_h, void* stream);
void gru_forward_reset_first(
    const Lstm& call, int64_t step, const void* from_hidden, const void* from_reset_h,
    void* stream);
// Backward: the first writes the gradient of W_hn (r h) to `dn`, (D, B, H); from the gradient of
// r h, `d_reset_h`, (D, B, H), the second writes that of W_hh h of r and z to `da`, (D, B, H, 2).
void gru_backward_reset_first(
    const Lstm& call, int64_t step, const void* dh_recurrent, void* dn, void* stream);
void gru_backward_reset(
    const Lstm& call, int64_t step, const void* d_reset_h, void* da, void* stream);

// A whole sequence in one launch ------------------------------------------------------------------

// Arguments of the whole-sequence launches in addition to the call. Rows of the states that blocks
// exchange begin at multiples of 16 bytes and are padded with zeros: N' is N rounded up to a
// multiple of 8.
struct LstmSequence {
  const void* weight_hh;   // (D, H, G, R)
  const void* weight_hr;   // (D, R, H) or null
  const int64_t* order;    // (B,): rows, longest first; or null: in memory order, all T long
  const int64_t* lengths;  // (B,): lengths of the rows in that order
  // The states that the products with W_hh and W_hr multiply. operand_hh: forward (2, D, B, R'),
  // the first h0 after dropout; backward (2, D, B, (G H)'). operand_hr, with a projection: forward
  // m, (D, B, H'); backward d(W_hr m), (D, B, R').
  void* operand_hh;
  void* operand_hr;
  uint32_t* arrivals;  // kArrivals counters
  static constexpr int kBarriers = 64, kArrivals = 32 * kBarriers;
  float* parts;          // backward: lstm_backward_parts numbers, partial sums of h's gradient
  void* grad_projected;  // backward with a projection: (D, T, B, R)

  // Steps of a layer in one launch. Each layer is one chunk behind the layer that it reads: layer d
  // runs chunk `wave` - d, if there is such a chunk. Directions have all T steps in one chunk.
  int64_t chunk, wave = 0;

  struct Steps {
    int64_t first, last;  // `last` is exclusive; both are T if there are no steps
  };
  constexpr Steps steps(const Lstm& call, int64_t d) const {
    const int64_t first = (wave - (call.layers ? d : 0)) * chunk;
    if (first < 0 || first >= call.T) return {call.T, call.T};
    return {first, std::min(first + chunk, call.T)};
  }
  constexpr int64_t waves(const Lstm& call) const {
    return (call.T + chunk - 1) / chunk + (call.layers ? call.chains - 1 : 0);
  }
};

// Returns whether the current device's multiprocessors can hold all recurrent weights at once, and
// if not, why. Reads only the dtype, the sizes, `layers`, `projected` and norm_hh.
bool lstm_fits_sequence(const Lstm& call, bool backward, std::string* why_not = nullptr);

// Returns how many numbers `parts` must hold for the backward of a call that fits; may be 0.
int64_t lstm_backward_parts(const Lstm& call);

// Run the steps of a wave, which for directions are all steps. The call must fit. Results are those
// of the step-by-step functions above, except that the backward leaves the whole gradient of h0 in
// grad_h.
void lstm_forward_sequence(const Lstm& call, const LstmSequence& sequence, void* stream);
void lstm_backward_sequence(const Lstm& call, const LstmSequence& sequence, void* stream);

}  // namespace trifuse::cuda
