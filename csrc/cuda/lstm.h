// The LSTM on a GPU: one layer in one or two directions, or some layers of a stack, as plain
// pointers and sizes, and its launchers.
//
// Names and rules are those of pytorch_ext/reference/lstm.py. What goes over all tokens at once,
// the products of the input and those that make the weights' gradients, is the caller's, and so are
// in the step-by-step way the two products of a step. All pointers are the device's; tensors are
// contiguous.
//
// Gates lie side by side: those of a unit are i, f, g, o, four neighbours, so that whoever owns a
// unit owns all of them. Where f is 1 - i its weights are zeros, and so are its gradients.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "../dtype.h"

namespace trifuse::cuda {

struct Lstm {
  static constexpr int kMaxDirections = 4;  // or layers
  // Gradients of vectors, of each unit: of the peepholes to i, f and o; and with layer norm those
  // of the biases and of the gains of both products, each four, and of gain and bias of c.
  enum Share {
    OfPeephole = 0, OfBias = 3, OfNormIh = 7, OfNormHh = 11, OfNormCell = 15, kShares = 17
  };

  DType dtype;  // vectors and c are in the accumulation type: float32, or float64 for Float64
  int64_t T, B, H, R;  // R: what h has
  int64_t directions;
  // They aren't directions of one layer but as many layers, each of which reads the output of the
  // one before. What is (T, B, D, ...) below is then (D, T, B, ...).
  bool layers;
  bool reverse[kMaxDirections];
  bool coupled, projected, training;
  double cell_clip, proj_clip, eps;  // infinity: no clip
  double zoneout_h, zoneout_c;
  uint32_t threshold_h, threshold_c;  // of zoneout in training, as random bits are compared with it
  const int64_t* seed;                // (1,), or null where nothing is drawn
  const int64_t* lengths;             // (B,), or null: all T

  // Null where the call has none. D is the number of directions.
  const void* bias;              // (D, H, 4): both biases and the forget bias
  const void* peephole;          // (D, 3, H): i, f, o
  const void* norm_ih;           // (D, H, 4)
  const void* norm_hh;           // (D, H, 4)
  const void* norm_cell_weight;  // (D, H)
  const void* norm_cell_bias;    // (D, H)
  const void* dropout;           // (D, B, R): what h is multiplied by on its way to the gates

  void* workspace;  // as many bytes as lstm_workspace says; or null

  // Over all steps. In the backward, from_input holds the gradient of itself in the end. Before, it
  // is read where gates weren't saved, or with layer norm; in the first case without it, it has all
  // of the preactivations but for the bias.
  void* from_input;  // (T, B, D, H, 4): W_ih x
  void* output;      // (T, B, D, R)
  void* gates;       // (D, T, B, H, 4), or 3 if coupled: i, g, o; null if not saved
  void* cells;       // (D, T, B, H): c_t; null if not saved
  bool* clipped;     // (D, T, B, clipped_columns()): units of c, if it has a clip, then of h; or null

  // Forward: what a step leaves to the next.
  void* h;        // (D, B, R)
  void* operand;  // (D, B, R): h after recurrent dropout; null without it
  void* c;        // (D, B, H)

  // Backward.
  const void* grad_output;  // (T, B, D, R)
  const void* c0;           // (D, B, H)
  void* grad_h;             // (D, B, R), in the accumulation type: but for what comes through W_hh
  void* grad_c;             // (D, B, H)
  void* from_hidden;        // (T, B, D, H, 4), with layer norm: W_hh h, in the end its gradient
  // (D, B, kShares, H) or, without layer norm, (D, B, 3, H): rows' gradients of vectors, added to
  // what is there; null where none are needed.
  void* shares;

  static constexpr bool clips(double limit) {
    return limit < std::numeric_limits<double>::infinity();
  }
  constexpr int64_t clipped_columns() const {
    return (clips(cell_clip) ? H : 0) + (clips(proj_clip) ? R : 0);
  }
  constexpr int shares_count() const { return norm_hh ? int(kShares) : int(OfBias); }
};

// `stream` is a cudaStream_t. All of these throw std::runtime_error where a kernel can't be
// launched.

// (D, B, R): the multipliers of recurrent dropout.
void lstm_dropout(
    const Lstm& call, void* multipliers, uint32_t threshold, double scale, void* stream);

// Step by step ------------------------------------------------------------------------------------

// How many bytes of workspace a call needs: rows that must stay whole, by layer norm, may not fit a
// block's shared memory. Reads the dtype, the sizes and whether there is layer norm.
int64_t lstm_workspace(const Lstm& call);

// Step `step` but for its products. `from_hidden` is (D, B, H, 4), W_hh h. `hidden`, (D, B, H),
// takes m where a projection follows. Outputs past a row's length are not written.
void lstm_forward_step(
    const Lstm& call, int64_t step, const void* from_hidden, void* hidden, void* stream);

// The rest of a step after a projection: `projected` is (D, B, R), W_hr m.
void lstm_forward_projection(const Lstm& call, int64_t step, const void* projected, void* stream);

// A step back. `through` is the gradient of h that came through the product of the step after, (D,
// B, R), or with a projection that of m, (D, B, H). `operand`, (D, B, H, 4), takes the gradient of
// W_hh h. Nothing is written past a row's length but zeros to the operand.
void lstm_backward_step(
    const Lstm& call, int64_t step, const void* through, void* operand, void* stream);

// With a projection, first: from the gradient of h to that of W_hr m, which `grad_projected`, (D,
// B, R), takes and `all`, (D, T, B, R).
void lstm_backward_projection(
    const Lstm& call, int64_t step, const void* through, void* grad_projected, void* all,
    void* stream);

// m of all steps, (D, T, B, H), for the projection's gradient; 0 past a row's length.
void lstm_hidden(const Lstm& call, void* hidden, void* stream);

// A whole sequence in one launch ------------------------------------------------------------------

// What the launches of whole sequences need beside the call. States that blocks exchange have rows
// that begin at multiples of 16 bytes, with zeros past their end: N' is N rounded up to a multiple
// of 8.
struct LstmSequence {
  const void* weight_hh;   // (D, H, 4, R)
  const void* weight_hr;   // (D, R, H) or null
  const int64_t* order;    // (B,): rows, the longest first; or null: as they are, all T long
  const int64_t* lengths;  // (B,): theirs, in that order
  void* operand;  // forward (2, D, B, R'), the first h0 after dropout; backward (2, D, B, (4 H)')
  void* hidden;   // with a projection; forward (D, B, H'), backward (D, B, R')
  uint32_t* arrivals;  // kArrivals numbers
  static constexpr int kArrivals = 32 * Lstm::kMaxDirections;
  float* parts;        // lstm_backward_parts numbers
  void* grad_projected;  // backward with a projection: (D, T, B, R)

  // A launch takes so many steps of every layer, each a chunk behind the one that it reads: layer d
  // is at chunk `wave` - d, where there is such a chunk. Directions have all T in one.
  int64_t chunk, wave = 0;

  struct Steps {
    int64_t first, last;  // the last not among them; both T where there are none
  };
  constexpr Steps steps(const Lstm& call, int64_t d) const {
    const int64_t first = (wave - (call.layers ? d : 0)) * chunk;
    if (first < 0 || first >= call.T) return {call.T, call.T};
    return {first, std::min(first + chunk, call.T)};
  }
  constexpr int64_t waves(const Lstm& call) const {
    return (call.T + chunk - 1) / chunk + (call.layers ? call.directions - 1 : 0);
  }
};

// Whether the current device's multiprocessors can hold the weights, all at once; or else why not.
// Reads the dtype and the sizes of h and c.
bool lstm_fits_sequence(const Lstm& call, bool backward, std::string* why_not = nullptr);

// How many numbers the backward of a call that fits needs for what its blocks send to one another.
int64_t lstm_backward_parts(const Lstm& call);

// The steps of a wave, all but for layers; only where they fit. Leaves what the steps one by one
// leave: in the backward, grad_h is all of the gradient of h0.
void lstm_forward_sequence(const Lstm& call, const LstmSequence& sequence, void* stream);
void lstm_backward_sequence(const Lstm& call, const LstmSequence& sequence, void* stream);

}  // namespace trifuse::cuda
