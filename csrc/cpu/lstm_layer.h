// Shared by the LSTM forward and backward: a layer's weights, packed as B of the products that form
// its gates, and the gates.

#pragma once

#include "cpu/lstm_norm.h"
#include "cpu/lstm_units.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// Tokens whose products with W_ih are computed at once.
constexpr int64_t kChunkTokens = 128;

inline int64_t tiles(int64_t columns) { return (columns + kTile - 1) / kTile; }

// Reinterpret rows of S as rows of E; elements_ld is their row length.
template <class E>
const E* as_elements(const Stored<E>* rows) {
  return reinterpret_cast<const E*>(rows);
}
template <class E>
int64_t elements_ld(int64_t ld) {
  return ld / kPack<E>;
}

template <class E>
struct Layer {
  using S = Stored<E>;
  using T = AccumulatorOf<E>;
  using U = Units<T>;

  explicit Layer(const LstmProblem& p)
      : p(p), panels(p), norm(p.direction[0].norm_ih_weight), projected(p.direction[0].weight_hr),
        chunk(
            std::clamp<int64_t>(
                std::max(kChunkTokens, few_tokens()) / group_rows(), 1,
                std::max<int64_t>(p.steps, 1))) {}

  struct Weights {
    E *ih, *hh;  // [panels][k][columns]
    E* hr;       // [tiles of 64 columns][k][64]
    T* bias;     // [panels][width], as are norm_ih and norm_hh
    T *norm_ih, *norm_hh;
    T* peephole;   // [3][units]: i, f, o
    T* norm_cell;  // [2][units]: weight, bias
  };
  // Takes memory for the packed weights whose flag is set, and for all vectors.
  void take_weights(Arena& arena, bool ih, bool hh, bool hr) {
    const int64_t size = panels.count * panels.width();
    for (int64_t d = 0; d < p.directions; ++d) {
      Weights& w = weights[d];
      w.ih = arena.take<E>(ih ? panels.count * ih_size() : 0);
      w.hh = arena.take<E>(hh ? panels.count * hh_size() : 0);
      w.hr = arena.take<E>(hr ? tiles(p.R) * hr_size() : 0);
      w.bias = arena.take<T>(size);
      w.norm_ih = arena.take<T>(norm ? size : 0);
      w.norm_hh = arena.take<T>(norm ? size : 0);
      w.peephole = arena.take<T>(3 * m_ld());
      w.norm_cell = arena.take<T>(norm ? 2 * m_ld() : 0);
    }
  }

  // Returns the number of all tokens if their products with W_ih take no more memory than W_ih,
  // which is then read once; otherwise 0.
  int64_t few_tokens() const {
    const int64_t all = group_rows() * p.steps;
    const auto weights = p.I * static_cast<int64_t>(sizeof(S));
    return all * static_cast<int64_t>(sizeof(T)) <= weights ? all : 0;
  }
  int64_t group_rows() const { return std::max<int64_t>((p.B + p.groups - 1) / p.groups, 1); }
  int64_t ih_size() const { return packed_rows<E>(elements<E>(p.I)) * panels.ih_width(); }
  int64_t hh_size() const { return packed_rows<E>(elements<E>(p.R)) * panels.hh_width(); }
  int64_t hh_bytes() const { return panels.count * hh_size() * static_cast<int64_t>(sizeof(E)); }
  int64_t hr_size() const { return packed_rows<E>(elements<E>(p.H)) * kTile; }
  // Padded row lengths of x, h and m, because rows whose distance is a power of two would evict one
  // another from a cache. The padding is 0, because the matrix unit reads some of it.
  int64_t x_ld() const { return round_up(p.I, kUnits) + kUnits; }
  int64_t h_ld() const { return round_up(p.R, kTile) + kUnits; }
  int64_t m_ld() const { return round_up(p.H, kUnits) + kUnits; }
  // Returns the offset of panel q's units of row i in [panels][rows][16].
  int64_t unit_row(int64_t q, int64_t i) const { return (q * group_rows() + i) * kUnits; }
  // Copy row i between that layout and a row of H values. Without a row, store_units stores zeros.
  void load_units(const T* units, int64_t i, T* row) const {
    for (int64_t q = 0; q < panels.count; ++q)
      std::copy_n(units + unit_row(q, i), units_of(p, q), row + q * kUnits);
  }
  void store_units(const T* row, int64_t i, T* units) const {
    for (int64_t q = 0; q < panels.count; ++q) {
      T* target = std::fill_n(units + unit_row(q, i), kUnits, T(0)) - kUnits;
      if (row) std::copy_n(row + q * kUnits, units_of(p, q), target);
    }
  }
  int64_t panel_size() const { return std::max(ih_size(), hh_size()); }
  int64_t row_buffer_size() const { return kTile * elements<E>(std::max({p.I, p.R, p.H})); }

  // Packs the weights that are kept; with `hh`, W_hh too.
  void pack(const Team& team, bool hh = true) {
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& given = p.direction[d];
      const Weights& w = weights[d];
      const Range share = team.share(panels.count);
      for (int64_t q = share.first; w.ih && q < share.last; ++q)
        pack_ih(d, q, w.ih + q * ih_size());
      if (hh && w.hh)
        for (const auto& blocks : {panels.with_h(), panels.with_reset_h()})
          keep_hh_panels(d, share, blocks);
      if (w.hr) {
        const Range share = team.share(tiles(p.R));
        for (int64_t tile = share.first; tile < share.last; ++tile)
          pack_rows_as_columns<E>(
              static_cast<const S*>(given.weight_hr) + tile * kTile * p.H,
              std::min(kTile, p.R - tile * kTile), p.H, row_buffer, w.hr + tile * hr_size());
      }
      if (team.index == 0) pack_vectors(given, w);
    }
  }

  void pack_ih(int64_t d, int64_t q, E* target) const {
    pack_panel_columns<E>(
        p, static_cast<const S*>(p.direction[d].weight_ih), p.I, panels.ih_gate, panels.ih(), q,
        row_buffer, target);
  }
  void pack_hh(int64_t d, int64_t q, const Panels::Blocks& blocks, E* target) const {
    pack_panel_columns<E>(
        p, static_cast<const S*>(p.direction[d].weight_hh), p.R, panels.hh_gate, blocks, q,
        row_buffer, target);
  }
  // Packs these blocks of some panels of W_hh where they are kept.
  void keep_hh_panels(int64_t d, const Range& share, const Panels::Blocks& blocks) const {
    for (int64_t q = share.first; q < share.last; ++q)
      pack_hh(d, q, blocks, weights[d].hh + q * hh_size() + hh_offset(blocks));
  }
  // Returns the offset of these blocks in a packed panel of W_hh. Blocks that are multiplied
  // together lie together.
  int64_t hh_offset(const Panels::Blocks& blocks) const {
    return packed_rows<E>(elements<E>(p.R)) * (blocks.first - panels.hh_first) * kUnits;
  }

  // Whether an unpacked weight can be read in place. On the matrix unit its rows would be the left
  // operand (unpacked_weight.h), which these products do not support.
  static constexpr bool kReadsInPlace = !kUsesMatrixUnit<E>;
  static bool reads_in_place(int64_t rows) { return kReadsInPlace && rows <= kRowsAtOnce; }

  // Return a panel of W_ih, or blocks of a panel of W_hh. If no packed weight is kept, because it
  // would be read only once, it is packed now.
  const E* ih_panel(int64_t d, int64_t q) const {
    if (weights[d].ih) return weights[d].ih + q * ih_size();
    pack_ih(d, q, panel);
    return panel;
  }
  const E* hh_panel(int64_t d, int64_t q, const Panels::Blocks& blocks) const {
    if (weights[d].hh) return weights[d].hh + q * hh_size() + hh_offset(blocks);
    pack_hh(d, q, blocks, panel);
    return panel;
  }

  void pack_vectors(const LstmDirection& given, const Weights& w) {
    const int64_t columns = m_ld(), width = panels.width();
    std::fill_n(w.bias, panels.count * width, T(0));
    add_to_panels(p, panels, panels.ih_gate, given.bias_ih, w.bias);
    add_to_panels(p, panels, panels.hh_gate, given.bias_hh, w.bias);
    if (p.forget_bias != 0)
      for (int64_t q = 0; q < panels.count; ++q)
        for (int64_t u = 0; u < kUnits; ++u)
          w.bias[q * width + kUnits + u] += static_cast<T>(p.forget_bias);
    const auto padded = [&](const void* vector, T* target) {
      std::fill_n(target, columns, T(0));
      if (vector) std::copy_n(static_cast<const T*>(vector), p.H, target);
    };
    if (given.weight_peephole) {
      const T* peephole = static_cast<const T*>(given.weight_peephole);
      padded(peephole, w.peephole);
      padded(p.coupled ? nullptr : peephole + p.H, w.peephole + columns);
      padded(peephole + (p.coupled ? 1 : 2) * p.H, w.peephole + 2 * columns);
    }
    if (given.norm_ih_weight) {
      std::fill_n(w.norm_ih, panels.count * width, T(0));
      std::fill_n(w.norm_hh, panels.count * width, T(0));
      add_to_panels(p, panels, panels.ih_gate, given.norm_ih_weight, w.norm_ih);
      add_to_panels(p, panels, panels.hh_gate, given.norm_hh_weight, w.norm_hh);
      padded(given.norm_cell_weight, w.norm_cell);
      padded(given.norm_cell_bias, w.norm_cell + columns);
    }
  }

  // Gathers this thread's rows of the input, step by step, padded to x_ld().
  void gather(const RowGroup& group, const Team& team, int64_t s0, int64_t s1, S* tokens) const {
    for (int64_t s = s0; s < s1; tokens += group.active(s++) * x_ld()) {
      const Range own = team.share(group.active(s));
      for (int64_t i = own.first; i < own.last; ++i) {
        S* target = tokens + i * x_ld();
        copy_input(group, i, s, 0, p.I, target);
        std::fill_n(target + p.I, x_ld() - p.I, S(0));
      }
    }
  }
  void copy_input(
      const RowGroup& group, int64_t i, int64_t s, int64_t column, int64_t columns,
      S* target) const {
    const S* x = static_cast<const S*>(p.input) + group.position(i, s) * p.input_stride[0] +
        group.row(i) * p.input_stride[1] + column * p.input_stride[2];
    if (p.input_stride[2] == 1) std::copy_n(x, columns, target);
    else
      for (int64_t k = 0; k < columns; ++k) target[k] = x[k * p.input_stride[2]];
  }

  // Copies columns of h before step s, with zeros where recurrent dropout drops elements.
  void copy_hidden(
      const RowGroup& group, int64_t i, int64_t s, int64_t column, int64_t columns,
      S* target) const {
    const S* h = group.template h<S>(i, s - 1);
    if (!h) {
      std::fill_n(target, columns, S(0));
      return;
    }
    std::copy_n(h + column, columns, target);
    if (p.recurrent_dropout.threshold) {
      const uint64_t kept =
          group.kept(p.recurrent_dropout, RowGroup::RecurrentDropout, i, 0, column);
      for (int64_t k = 0; k < columns; ++k)
        if (!(kept >> k & 1)) target[k] = S(0);
    }
  }

  // Computes a panel's W_ih x for `tokens` tokens, [tokens][width], and adds the biases unless the
  // product is normalised without them. With `may_read_in_place`, an unpacked weight may be read in
  // place.
  template <bool may_read_in_place = false>
  void multiply_input(int64_t d, int64_t q, int64_t tokens, const S* x, T* target) const {
    const int64_t width = panels.width();
    const T* bias = weights[d].bias + q * width;
    T* columns = target + panels.ih_first * kUnits;
    if constexpr (may_read_in_place && kReadsInPlace)
      if (!weights[d].ih && reads_in_place(tokens)) {
        if (!norm)
          for (int64_t k = 0; k < tokens; ++k) std::copy_n(bias, width, target + k * width);
        return product_with_panel<E>(
            p, static_cast<const S*>(p.direction[d].weight_ih), p.I, panels.ih_gate, panels.ih(), q,
            row_buffer, tokens, as_elements<E>(x), elements_ld<E>(x_ld()), columns, width, !norm,
            false);
      }
    // The product accumulates on the biases; only blocks that it does not fill are set to the
    // biases here.
    const int64_t first = panels.ih_first * kUnits, filled = p.I > 0 ? panels.ih_width() : 0;
    if (!norm && filled < width)
      for (int64_t k = 0; k < tokens; ++k) {
        std::copy_n(bias, first, target + k * width);
        std::copy_n(
            bias + first + filled, width - first - filled, target + k * width + first + filled);
      }
    product_with_packed<E>(
        tokens, panels.ih_width(), elements<E>(p.I), as_elements<E>(x), elements_ld<E>(x_ld()),
        ih_panel(d, q), panels.ih_width(), 0, columns, width, /*add=*/!norm && p.I == 0, false,
        norm || p.I == 0 ? nullptr : bias + first);
  }

  // Computes these blocks of a panel's W_hh h, and with `add` adds them to the target. With
  // recurrent dropout, h is 0 where D is, and the factor of D is applied here, because h times the
  // factor would not be exact in 16 bits.
  template <bool may_read_in_place = false>
  void multiply_hidden(
      int64_t d, int64_t q, int64_t rows, const S* h, const Panels::Blocks& blocks, T* target,
      bool add) const {
    const int64_t width = panels.width();
    const double factor = p.recurrent_dropout.threshold ? p.recurrent_dropout.scale : 1;
    if (factor != 1 && add) scale(target, rows * width, static_cast<T>(1 / factor));
    T* columns = target + blocks.first * kUnits;
    const bool ahead = exceeds_cache<E>(panels.count * hh_size());
    const bool unpacked = may_read_in_place && !weights[d].hh && reads_in_place(rows);
    if constexpr (may_read_in_place && kReadsInPlace)
      if (unpacked)
        product_with_panel<E>(
            p, static_cast<const S*>(p.direction[d].weight_hh), p.R, panels.hh_gate, blocks, q,
            row_buffer, rows, as_elements<E>(h), elements_ld<E>(h_ld()), columns, width, add,
            ahead);
    if (!unpacked)
      product_with_packed<E>(
          rows, blocks.width(), elements<E>(p.R), as_elements<E>(h), elements_ld<E>(h_ld()),
          hh_panel(d, q, blocks), blocks.width(), 0, columns, width, add, ahead);
    if (factor != 1) scale(target, rows * width, static_cast<T>(factor));
  }

  // As multiply_input, and as multiply_hidden with `add`, for panel q and, if four panels are
  // multiplied at once, the three after it. Panels from `last` on are left out, and targets lie
  // `stride` apart. Return the number of panels.
  int64_t multiply_inputs(
      int64_t d, int64_t q, int64_t last, int64_t tokens, const S* x, T* target,
      int64_t stride) const {
    if constexpr (kOneVectorPanels<E>)
      if (panels.blocks == 1 && q + kPanelsAtOnce <= last && weights[d].ih) {
        for (int j = 0; j < kPanelsAtOnce; ++j)
          for (int64_t k = 0; k < tokens; ++k)
            std::copy_n(
                weights[d].bias + (q + j) * kUnits, kUnits, target + j * stride + k * kUnits);
        product_with_four_panels<E>(
            tokens, elements<E>(p.I), as_elements<E>(x), elements_ld<E>(x_ld()), ih_panel(d, q),
            ih_size(), target, kUnits, stride);
        return kPanelsAtOnce;
      }
    multiply_input<true>(d, q, tokens, x, target);
    return 1;
  }
  int64_t multiply_hiddens(
      int64_t d, int64_t q, int64_t last, int64_t rows, const S* h, const Panels::Blocks& blocks,
      T* target, int64_t stride) const {
    if constexpr (kOneVectorPanels<E>)
      if (blocks.count == 1 && q + kPanelsAtOnce <= last && weights[d].hh &&
          !exceeds_cache<E>(panels.count * hh_size())) {
        product_with_four_panels<E>(
            rows, elements<E>(p.R), as_elements<E>(h), elements_ld<E>(h_ld()),
            hh_panel(d, q, blocks), hh_size(), target + blocks.first * kUnits, panels.width(),
            stride);
        return kPanelsAtOnce;
      }
    multiply_hidden<true>(d, q, rows, h, blocks, target, true);
    return 1;
  }

  static void scale(T* values, int64_t count, T factor) {
    for (int64_t k = 0; k < count; ++k) values[k] *= factor;
  }

  // c is c~ in the formula (pytorch_ext/reference/lstm.py).
  struct LstmGates {
    U i, f, g, o, c;
    uint16_t clipped = 0;  // bit k: c's unit k was clipped
  };

  LstmGates activate(const RowGroup& group, int64_t q, const U a[4], const U& c_old) const {
    const Weights& w = weights[group.index];
    const bool peephole = group.d.weight_peephole;
    const T* p_i = w.peephole + q * kUnits;
    U a_i = a[0], a_f = a[1], a_o = a[panels.blocks - 1];
    if (peephole) {
      a_i = multiply_add(U::load(p_i), c_old, a_i);
      if (!p.coupled) a_f = multiply_add(U::load(p_i + m_ld()), c_old, a_f);
    }
    LstmGates gates;
    gates.i = sigmoid(a_i);
    gates.f = p.coupled ? U(T(1)) - gates.i : sigmoid(a_f);
    gates.g = tanh(a[panels.blocks - 2]);
    gates.c = multiply_add(gates.f, c_old, gates.i * gates.g);
    if (std::isfinite(p.cell_clip)) {
      gates.clipped = clipped_bits(gates.c, p.cell_clip);
      gates.c = clip(gates.c, p.cell_clip);
    }
    if (peephole) a_o = multiply_add(U::load(p_i + 2 * m_ld()), gates.c, a_o);
    gates.o = sigmoid(a_o);
    return gates;
  }

  // Returns where a layer-norm LSTM's forward saves a panel's two products for its backward.
  T* kept_products(const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    const int64_t token = group.position(i, s) * p.B + group.row(i);
    return static_cast<T*>(group.d.gates) + (token * p.H + q * kUnits) * 2 * panels.blocks;
  }

  // Computes a layer-norm LSTM's a, block by block, from the two products and their statistics.
  void normalised_gates(
      int64_t d, int64_t q, const T* x, const Statistics<T>& x_statistics, const T* h,
      const Statistics<T>& h_statistics, U a[4]) const {
    const Weights& w = weights[d];
    for (int b = 0; b < panels.blocks; ++b) {
      const int64_t at = q * panels.width() + b * kUnits;
      const U h_normalised = h_statistics.normalise(U::load(h + b * kUnits));
      const U x_normalised = x_statistics.normalise(U::load(x + b * kUnits));
      a[b] = multiply_add(h_normalised, U::load(w.norm_hh + at), U::load(w.bias + at));
      a[b] = multiply_add(x_normalised, U::load(w.norm_ih + at), a[b]);
    }
  }

  const LstmProblem& p;
  const Panels panels;
  const bool norm, projected;
  const int64_t chunk;  // steps whose products W_ih x are computed at once
  Weights weights[LstmProblem::kMaxDirections];
  // This thread's memory.
  E* row_buffer = nullptr;  // row_buffer_size() elements: rows of a weight that is being packed
  E* panel = nullptr;       // panel_size() elements
};

// Calls f.template operator()<Element>() for the type in which a problem is computed. Instruction
// sets with bfloat16 products are compiled only for bfloat16 (capability.h).
template <class F>
auto for_element([[maybe_unused]] const LstmProblem& p, const F& f) {
#ifdef __AVX512BF16__
  return f.template operator()<BFloat16Pair>();
#else
  if (p.dtype == DType::Float64) return f.template operator()<double>();
  return f.template operator()<float>();
#endif
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
