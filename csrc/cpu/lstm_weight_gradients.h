// Computes the gradients of the weights and the input, after the last step of the backward of an
// LSTM, a GRU or an RNN.
//
// The steps leave the gate gradients of all tokens, panel by panel. The gradients of the weights
// and the input are products over all tokens, cut into tasks that any thread may run. A task owns
// the rows of a weight's gradient that belong to a panel (in an RNN, to four panels), or some
// hundred tokens of the input's gradient. The gradients of vectors that cannot be computed from the
// gate gradients alone are added up during the steps.
//
// Floor: 2 · G·H · (I + R) (+ 2 · R · H) operations a token, on the multiply-add pipes, and for the
// input's gradient 2 · G·H · I more.

#pragma once

#include "cpu/long_sum.h"
#include "cpu/lstm_layer.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// Sums over tokens, which grow step by step.
template <class T>
struct TokenSums {
  int64_t count = 0;
  T* run = nullptr;         // sums of the current run
  double* total = nullptr;  // sums of the finished runs

  TokenSums() = default;
  TokenSums(Arena& arena, int64_t count)
      : count(count), run(arena.take<T>(count)), total(arena.take<double>(count)) {}
  void clear() const {
    std::fill_n(run, count, T(0));
    std::fill_n(total, count, 0.0);
  }
  void end_run(int64_t first, int64_t columns) const {
    TRIFUSE_CAPABILITY::end_run(run + first, total + first, columns);
  }
  void store(int64_t first, int64_t columns, void* to) const {
    for (int64_t k = 0; k < columns; ++k)
      static_cast<T*>(to)[k] =
          static_cast<T>(total[first + k] + static_cast<double>(run[first + k]));
  }
};

template <class E>
class WeightGradients {
  using S = typename Layer<E>::S;
  using T = typename Layer<E>::T;
  using U = typename Layer<E>::U;

 public:
  // The factors of the weights' gradients in one direction: the gradients that the steps write, and
  // x, h and m. Tokens are numbered step by step.
  struct Gradients {
    S* da;   // [panels][tokens][width]: gradients of W_hh's product; in a GRU all blocks
    S* dax;  // gradients of W_ih's product; the same as da unless products are normalised
    S* dq;   // [tiles of R][tokens][64]: gradients of W_hr's product
    S* m;    // [tiles of H][tokens][64]; of a GRU whose reset gate precedes the product, r h
    E* x;    // [tiles of I][tokens][64]: B of W_ih's gradient
    E* h;    // [tiles of R][tokens][64]: h before each step, B of W_hh's gradient
    TokenSums<T> peephole;  // [3][units]
    TokenSums<T> bias;      // [3][panels][width]: gradients of the bias and of both norms' weights
    TokenSums<T> cell;      // [2][units]: gradients of the cell norm's weight and bias
  };

  // One thread's memory for a task.
  struct Memory {
    E *packed_a, *packed_b;  // operands of a product
    E* rows_a;               // [64][rows_ld()]: packed_a transposed
    T* sums;                 // [tiles][tokens][64]
  };

  WeightGradients(const Layer<E>& layer, int64_t threads)
      : tokens(layer.p.start[layer.p.steps]), streams(threads > 1 && worth_streaming(layer.panels)),
        layer(layer), p(layer.p), panels(layer.panels) {}

  void take(Arena& arena) {
    const int64_t width = panels.width();
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      Gradients& g = directions[d];
      g.da = arena.take<S>(panels.count * tokens * width);
      g.dax = layer.norm ? arena.take<S>(panels.count * tokens * width) : g.da;
      g.dq = arena.take<S>(layer.projected ? tiles(p.R) * tokens * kTile : 0);
      const bool has_m = layer.projected || (panels.resets_first && direction.grad_weight_hh);
      g.m = arena.take<S>(has_m ? tiles(p.H) * tokens * kTile : 0);
      g.x = arena.take<E>(direction.grad_weight_ih ? tiles(p.I) * elements<E>(tokens) * kTile : 0);
      g.h = arena.take<E>(direction.grad_weight_hh ? tiles(p.R) * elements<E>(tokens) * kTile : 0);
      g.peephole = TokenSums<T>(arena, direction.weight_peephole ? 3 * layer.m_ld() : 0);
      g.bias = TokenSums<T>(arena, layer.norm ? 3 * panels.count * width : 0);
      g.cell = TokenSums<T>(arena, layer.norm ? 2 * layer.m_ld() : 0);
    }
  }
  Memory take_memory(Arena& arena) const {
    const int64_t column = elements<E>(tokens) * kTile;
    const bool packs_b = kPack<E> == 2, packs_a = packs_b || panels_in_task() > 1;
    const int64_t depth = elements<E>(panels_together() * panels.ih_width());
    return {
        arena.take<E>(std::max(packs_a ? column : 0, kInputTokens * depth)),
        arena.take<E>(std::max(packs_b ? column : 0, depth * kTile)),
        arena.take<E>(kUsesMatrixUnit<E> ? kTile * rows_ld() : 0),
        arena.take<T>(kInputTiles * kInputTokens * kTile)};
  }

  // Packs x and h of all tokens, clears the sums, and sets the input's gradient past the rows'
  // lengths to 0. Runs before the first step.
  void begin(const Team& team) const {
    for (int64_t d = 0; d < p.directions; ++d) {
      const Gradients& gradients = directions[d];
      const RowGroup group{p, d};
      const Range blocks = team.share((tokens + kTile - 1) / kTile);
      for (int64_t tile = 0; gradients.h && tile < tiles(p.R); ++tile)
        pack_tokens(group, blocks, tile, p.R, true, gradients.h);
      for (int64_t tile = 0; gradients.x && tile < tiles(p.I); ++tile)
        pack_tokens(group, blocks, tile, p.I, false, gradients.x);
      if (team.index == 0) {
        gradients.peephole.clear();
        gradients.bias.clear();
        gradients.cell.clear();
      }
    }
    if (streams) fence_streams();
    if (p.grad_input) {
      const Range rows = team.share(p.B);
      for (int64_t r = rows.first; r < rows.last; ++r)
        for (int64_t t = p.length[r]; t < p.T; ++t)
          std::fill_n(static_cast<S*>(p.grad_input) + (t * p.B + p.order[r]) * p.I, p.I, S(0));
    }
  }

  // Returns where the steps write panel q's gradients of row i at step s. `grads` is da or dax.
  S* panel_row(S* grads, const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    return grads + (q * tokens + group.token(i, s)) * panels.width();
  }

  // Stores 16 gradients, or other factors of the weights' gradients, where the steps leave them.
  TRIFUSE_INLINE void keep(const U& x, S* to) const {
    if (streams) x.stream(to);
    else x.store(to);
  }

  int64_t tasks() const { return input_tasks() + p.directions * weight_tasks(); }

  // Runs one task. The largest tasks come first.
  void run_task(int64_t task) const {
    if (task < input_tasks())
      return input_gradient(task / input_groups(), task % input_groups() * kInputTiles * kTile);
    task -= input_tasks();
    const int64_t d = task / weight_tasks();
    task %= weight_tasks();
    const LstmDirection& direction = p.direction[d];
    const Gradients& gradients = directions[d];
    for (const bool hidden : {false, true}) {
      const int64_t width = hidden ? p.R : p.I, count = panel_groups() * groups(width);
      if (task < count) {
        const int64_t q = task / groups(width) * panels_in_task();
        const int64_t last = std::min(q + panels_in_task(), panels.count);
        if (!hidden && task % groups(width) == 0)
          for (int64_t panel = q; panel < last; ++panel) store_panel_vectors(d, panel);
        S* grad = static_cast<S*>(hidden ? direction.grad_weight_hh : direction.grad_weight_ih);
        if (!grad) return;
        const S* da = (hidden ? gradients.da : gradients.dax) + q * tokens * panels.width();
        const double factor =
            hidden && p.recurrent_dropout.threshold ? p.recurrent_dropout.scale : 1;
        const auto gradient_of = [&](const Panels::Blocks& blocks, const auto* right) {
          const int* gate = (hidden ? panels.hh_gate : panels.ih_gate) + blocks.first;
          const int64_t rows = (last - q) * blocks.width();
          weight_gradient(
              panels_in_task() > 1 ? side_by_side(da, last - q)
                                   : columns_of(da + blocks.first * kUnits, panels.width(), rows),
              rows, right, task % groups(width), width, factor, [&](int64_t m) -> S* {
                const int64_t block = m / kUnits;
                const int64_t unit = (q + block / blocks.count) * kUnits + m % kUnits;
                const int64_t row = gate[block % blocks.count] * p.H + unit;
                return unit < p.H ? grad + row * width : nullptr;
              });
        };
        if (hidden) gradient_of(panels.with_h(), gradients.h);
        else gradient_of(panels.ih(), gradients.x);
        if (hidden && panels.resets_first) gradient_of(panels.with_reset_h(), gradients.m);
        return;
      }
      task -= count;
    }
    if (layer.projected && task < tiles(p.R) * groups(p.H)) {
      S* grad = static_cast<S*>(direction.grad_weight_hr);
      if (!grad) return;
      const int64_t tile = task / groups(p.H);
      const int64_t rows = std::min(kTile, p.R - tile * kTile);
      weight_gradient(
          columns_of(gradients.dq + tile * tokens * kTile, kTile, rows), rows, gradients.m,
          task % groups(p.H), p.H, 1, [&](int64_t m) { return grad + (tile * kTile + m) * p.H; });
      return;
    }
    store_unit_vectors(d);
  }

  const int64_t tokens;
  // Whether the factors are stored past the caches. All threads read them, in this call and in the
  // next one that gets the same memory. Taking each line from another core's cache before it is
  // written would take longer.
  const bool streams;
  Gradients directions[LstmProblem::kMaxDirections];
  Memory memory;  // this thread's

 private:
  // The most that a task owns: tiles of columns of a weight's gradient; tokens and tiles of the
  // input's gradient.
  static constexpr int64_t kGroupTiles = 8, kInputTokens = 320, kInputTiles = 4;
  static constexpr int64_t kFlatRows = 12;  // rows of a gradient at once, with few tokens
  // Returns how many panels one product for the input's gradient adds up. Full panels make a chain
  // of 128 multiply-adds.
  int64_t panels_together() const { return kChain / kUnits / panels.ih_blocks; }

  // Packs 64 columns of x, or of h before their steps, for blocks of 64 tokens.
  void pack_tokens(
      const RowGroup& group, const Range& blocks, int64_t tile, int64_t width, bool hidden,
      E* panels_of) const {
    E* target = panels_of + tile * elements<E>(tokens) * kTile;
    const int64_t first = tile * kTile, columns = std::min(kTile, width - first);
    alignas(64) S rows[kTile * kTile];
    alignas(64) E packed[kTile * kTile];
    const int64_t begin = blocks.first * kTile, end = std::min(blocks.last * kTile, tokens);
    if (begin >= end) return;
    int64_t s = step_of(begin), i = begin - p.start[s];
    for (int64_t token = begin; token < end; token += kTile) {
      const int64_t count = std::min(kTile, end - token);
      for (int64_t k = 0; k < count; ++k, ++i) {
        if (i == group.active(s)) {
          i = 0;
          ++s;
        }
        S* row = rows + k * kTile;
        if (hidden) layer.copy_hidden(group, i, s, first, columns, row);
        else layer.copy_input(group, i, s, first, columns, row);
      }
      const Rows<S> from{rows, kTile, 1};
      E* to = target + elements<E>(token) * kTile;
      copy_right_rows<E>(from, count, columns, kTile, streams ? packed : to);
      if (streams) stream_lines(packed, elements<E>(count) * kTile * sizeof(E), to);
    }
  }

  // Returns the step of a token.
  int64_t step_of(int64_t token) const {
    return std::upper_bound(p.start, p.start + p.steps, token) - p.start - 1;
  }

  // Returns how many panels one task owns: those of 64 rows of a gradient. With only the 16 rows of
  // an RNN's panel, reading x or h from memory would take longer than the multiply-adds. A task of
  // several panels owns fewer columns, unless it has few tokens.
  int64_t panels_in_task() const { return kTile / kUnits / panels.blocks; }
  int64_t panel_groups() const { return (panels.count + panels_in_task() - 1) / panels_in_task(); }
  int64_t group_columns() const {
    return (has_few_tokens() ? kGroupTiles : kGroupTiles / panels_in_task()) * kTile;
  }
  // Returns whether writing a weight's gradient takes most of the time. Whole rows are faster to
  // write than tiles.
  bool has_few_tokens() const { return elements<E>(tokens) <= kTile; }
  int64_t groups(int64_t columns) const {
    return (columns + group_columns() - 1) / group_columns();
  }
  int64_t weight_tasks() const {
    return panel_groups() * (groups(p.I) + groups(p.R)) +
        (layer.projected ? tiles(p.R) * groups(p.H) : 0) + 1;
  }
  int64_t input_groups() const { return (tiles(p.I) + kInputTiles - 1) / kInputTiles; }
  int64_t input_tasks() const {
    return p.grad_input ? (tokens + kInputTokens - 1) / kInputTokens * input_groups() : 0;
  }

  // Returns `columns` columns of (tokens, ld) as a left operand of weight_gradient.
  Operand<E> columns_of(const S* a, int64_t ld, [[maybe_unused]] int64_t columns) const {
    if constexpr (kPack<E> == 2) {
      copy_right_rows<E>(Rows<S>{a, ld, 1}, tokens, columns, kTile, memory.packed_a);
      return left_of_packed(columns);
    } else {
      return {a, ld};
    }
  }

  // Returns `count` panels of one block each, [panels][tokens][16], as one such operand.
  Operand<E> side_by_side(const S* a, int64_t count) const {
    alignas(64) S rows[kTile * kTile];
    for (int64_t token = 0; token < tokens; token += kTile) {
      const int64_t some = std::min(kTile, tokens - token);
      for (int64_t j = 0; j < count; ++j)
        for (int64_t k = 0; k < some; ++k)
          std::copy_n(a + (j * tokens + token + k) * kUnits, kUnits, rows + k * kTile + j * kUnits);
      copy_right_rows<E>(
          Rows<S>{rows, kTile, 1}, some, count * kUnits, kTile,
          memory.packed_a + elements<E>(token) * kTile);
    }
    return left_of_packed(count * kUnits);
  }

  // Returns `columns` columns of packed_a as a left operand of weight_gradient. The matrix unit
  // reads it by rows, so it is transposed, once for all products with it.
  Operand<E> left_of_packed([[maybe_unused]] int64_t columns) const {
    if constexpr (kUsesMatrixUnit<E>) {
      transpose(memory.packed_a, kTile, elements<E>(tokens), columns, memory.rows_a, rows_ld());
      return {memory.rows_a, rows_ld()};
    }
    return {memory.packed_a, kTile};
  }
  // Padded, because rows whose distance is a power of two would evict one another from a cache.
  int64_t rows_ld() const { return round_up(elements<E>(tokens), 16) + 16; }

  // Computes a^T b over all tokens for `rows` columns of a and one group of b's 64-column panels,
  // which hold E, or S if not yet converted. Row m is written to row_of(m), unless that is null.
  template <class Right, class RowOf>
  void weight_gradient(
      const Operand<E>& a, int64_t rows, const Right* b, int64_t group, int64_t width,
      double factor, const RowOf& row_of) const {
    const int64_t begin = group * group_columns();
    const int64_t columns = std::min(group_columns(), width - begin);
    // The whole gradient would not stay in a cache. Stores past the caches that alternate with
    // others are slow, so its rows must be whole lines.
    const bool stream =
        exceeds_cache<S>(panels.count * panels.width() * width) && width * sizeof(S) % 64 == 0;
    const int64_t high = has_few_tokens() ? kFlatRows : kTile;
    const int64_t wide = has_few_tokens() ? group_columns() : kTile;
    // Up to this depth one product is exact enough; deeper sums consist of several products, which
    // are added up in double.
    constexpr int64_t kTogether = 16 * kChain;
    const int64_t depth = elements<E>(tokens);
    alignas(64) T sums[std::max(kFlatRows * kGroupTiles, kTile) * kTile];
    alignas(64) double totals[kTile * kTile];
    for (int64_t m = 0; m < rows; m += high)
      for (int64_t first = 0; first < columns; first += wide) {
        const int64_t count = std::min(high, rows - m), last = std::min(first + wide, columns);
        for (int64_t c = first; c < last; c += kTile) {
          const E* b_panel;
          if constexpr (std::is_same_v<Right, E>) {
            b_panel = b + (begin + c) / kTile * elements<E>(tokens) * kTile;
          } else {
            copy_right_rows<E>(
                Rows<S>{b + (begin + c) * tokens, kTile, 1}, tokens, kTile, kTile, memory.packed_b);
            b_panel = memory.packed_b;
          }
          for (int64_t k = 0; k < depth; k += kTogether) {
            const int64_t a_m = kUsesMatrixUnit<E> ? a.ld : 1, a_k = kUsesMatrixUnit<E> ? 1 : a.ld;
            product<E>(
                count, std::min(kTile, last - c), std::min(kTogether, depth - k),
                a.data + m * a_m + k * a_k, a_m, a_k, b_panel + k * kTile, kTile,
                sums + (c - first), wide, false);
            if (depth <= kTogether) break;
            if (k == 0) std::fill_n(totals, count * kTile, 0.0);
            end_run(sums, totals, count * kTile);
          }
          if (depth > kTogether) std::copy_n(totals, count * kTile, sums);
        }
        if (tokens == 0) std::fill_n(sums, count * wide, T(0));
        if (factor != 1) Layer<E>::scale(sums, count * wide, static_cast<T>(factor));
        for (int64_t k = 0; k < count; ++k)
          if (S* row = row_of(m + k))
            for (int64_t c = first; c < last; c += kTile) {
              const auto strip = Strip<T>::load(sums + k * wide + (c - first));
              if (last - c >= kTile) strip.store(row + begin + c, Whole{}, stream);
              else strip.store(row + begin + c, last - c, stream);
            }
      }
    if (stream) fence_streams();
  }

  // Computes the input's gradient for a block of tokens, in the order of a direction that is not
  // reversed, and for columns from `begin` on.
  void input_gradient(int64_t block, int64_t begin) const {
    const int64_t first = block * kInputTokens, rows = std::min(kInputTokens, tokens - first);
    const int64_t columns = std::min(kInputTiles * kTile, p.I - begin);
    const int64_t together = panels_together(), ld = together * panels.ih_width();
    struct Token {
      int64_t t, rank;
    } list[kInputTokens];
    int64_t s = step_of(first);
    for (int64_t k = 0; k < rows; ++k) {
      if (first + k == p.start[s + 1]) ++s;
      list[k] = {s, first + k - p.start[s]};
    }
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      for (int64_t q = 0; q < panels.count; q += together) {
        const int64_t count = std::min(panels.count - q, together);
        S* a = reinterpret_cast<S*>(memory.packed_a);
        for (int64_t k = 0; k < rows; ++k) {
          const auto [t, rank] = list[k];
          const int64_t token = p.start[direction.reverse ? p.length[rank] - 1 - t : t] + rank;
          for (int64_t j = 0; j < count; ++j)
            std::copy_n(
                directions[d].dax + ((q + j) * tokens + token) * panels.width() +
                    panels.ih_first * kUnits,
                panels.ih_width(), a + k * ld + j * panels.ih_width());
        }
        for (int64_t c = 0; c < columns; c += kTile) {
          E* target = memory.packed_b;
          for (int64_t j = 0; j < count; ++j)
            for (int b = panels.ih_first; b < panels.ih_first + panels.ih_blocks; ++b) {
              const S* weight = static_cast<const S*>(direction.weight_ih) +
                  (panels.ih_gate[b] * p.H + (q + j) * kUnits) * p.I;
              pack_unit_rows<E>(
                  weight, p.I, units_of(p, q + j), begin + c, std::min(kTile, columns - c), target);
              target += elements<E>(kUnits) * kTile;
            }
          product<E>(
              rows, std::min(kTile, columns - c), elements<E>(count * panels.ih_width()),
              as_elements<E>(a), elements_ld<E>(ld), 1, memory.packed_b, kTile,
              memory.sums + c * kInputTokens, kTile, d > 0 || q > 0);
        }
      }
    }
    for (int64_t k = 0; k < rows; ++k) {
      S* row = static_cast<S*>(p.grad_input) + (list[k].t * p.B + p.order[list[k].rank]) * p.I;
      for (int64_t c = 0; c < columns; c += kTile)
        narrow(
            memory.sums + c * kInputTokens + k * kTile, std::min(kTile, columns - c),
            row + begin + c, 1);
    }
  }

  // Writes a panel's gradients of the biases and of the products' norms.
  void store_panel_vectors(int64_t d, int64_t q) const {
    const LstmDirection& direction = p.direction[d];
    const Gradients& gradients = directions[d];
    const int64_t width = panels.width(), size = panels.count * width;
    const auto store_sums = [&](const TokenSums<T>& sums, int64_t first, const int* gate,
                                void* target) {
      if (!target) return;
      for (int b = 0; b < panels.blocks; ++b)
        if (gate[b] >= 0)
          sums.store(
              first + b * kUnits, units_of(p, q),
              static_cast<T*>(target) + gate[b] * p.H + q * kUnits);
    };
    if (layer.norm) {
      store_sums(gradients.bias, q * width, panels.ih_gate, direction.grad_bias);
      store_sums(gradients.bias, q * width, panels.hh_gate, direction.grad_bias_hh);
      store_sums(gradients.bias, size + q * width, panels.ih_gate, direction.grad_norm_ih);
      store_sums(gradients.bias, 2 * size + q * width, panels.ih_gate, direction.grad_norm_hh);
    } else if (direction.grad_bias || direction.grad_bias_hh) {
      T run[4 * kUnits] = {};
      double total[4 * kUnits] = {};
      TokenSums<T> sums;
      sums.run = run;
      sums.total = total;
      sum_tokens(gradients.da + q * tokens * width, sums);
      store_sums(sums, 0, panels.ih_gate, direction.grad_bias);
      store_sums(sums, 0, panels.hh_gate, direction.grad_bias_hh);
    }
  }

  // Writes the gradients of the peepholes and of the cell's norm.
  void store_unit_vectors(int64_t d) const {
    const LstmDirection& direction = p.direction[d];
    const Gradients& gradients = directions[d];
    const auto vector = [&](const TokenSums<T>& sums, int from, void* to, int64_t row) {
      if (to) sums.store(from * layer.m_ld(), p.H, static_cast<T*>(to) + row * p.H);
    };
    if (direction.grad_peephole) {
      vector(gradients.peephole, 0, direction.grad_peephole, 0);
      if (!p.coupled) vector(gradients.peephole, 1, direction.grad_peephole, 1);
      vector(gradients.peephole, 2, direction.grad_peephole, p.coupled ? 1 : 2);
    }
    if (layer.norm) {
      vector(gradients.cell, 0, direction.grad_norm_cell_weight, 0);
      vector(gradients.cell, 1, direction.grad_norm_cell_bias, 0);
    }
  }

  // Sums a panel's gradients over all tokens.
  void sum_tokens(const S* grads, const TokenSums<T>& sums) const {
    for (int64_t token = 0; token < tokens; token += kRun) {
      U run[4] = {U(T(0)), U(T(0)), U(T(0)), U(T(0))};
      for (int64_t k = token; k < std::min(token + kRun, tokens); ++k)
        for (int b = 0; b < panels.blocks; ++b)
          run[b] = run[b] + U::load(grads + k * panels.width() + b * kUnits);
      for (int b = 0; b < panels.blocks; ++b) run[b].store(sums.run + b * kUnits);
      sums.end_run(0, panels.width());
    }
  }

  // Returns whether the gate gradients of all tokens exceed a few times the L1 cache. Fewer stay in
  // the caches until they are read.
  bool worth_streaming(const Panels& panels) const {
    constexpr int64_t kBytes = 128 << 10;
    return panels.count * tokens * panels.width() * static_cast<int64_t>(sizeof(S)) > kBytes;
  }

  const Layer<E>& layer;
  const LstmProblem& p;
  const Panels& panels;
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
