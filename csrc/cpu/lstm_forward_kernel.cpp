// LSTM, GRU and RNN forward on a CPU.
//
// All threads stay in one parallel region for the whole sequence. A team of threads owns a
// direction, or a group of its rows; a thread of a team owns panels of 16 hidden units. The input's
// products are computed for about 128 tokens at a time, so that they stay in a cache until their
// steps run. At each step a thread multiplies all rows' h by its panels of W_hh, adds the input's
// products, and applies the gates to the tile while it is in the L1 cache. It then writes its units
// of c and of h. All threads read h at the next step, so there is one barrier per step. With a
// projection a thread writes its units of m, and after a barrier its columns of h. Layer
// normalisation needs sums over all units, which takes one more barrier for the products and one
// for the cells. A GRU whose reset gate precedes the product computes r, z and r h, and after a
// barrier n.
//
// Rows are sorted by length, so the rows that have a given step come first; past a row's end
// nothing is computed. Each element is a fixed chain of multiply-adds for any number of rows and
// threads.
//
// Floor: 2 · G·H · (I + R) (+ 2 · R · H) operations per token on the multiply-add pipes, or with
// few rows the bytes of W_hh, from the cache that holds it, at each step. Weights are packed once
// per call, or not at all for few rows and steps.

#include "cpu/kernels.h"
#include "cpu/lstm_layer.h"
#include "cpu/row.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class E>
class Forward {
  using S = typename Layer<E>::S;
  using T = typename Layer<E>::T;
  using U = typename Layer<E>::U;
  using LstmGates = typename Layer<E>::LstmGates;
  using Weights = typename Layer<E>::Weights;

 public:
  Forward(const LstmProblem& p, void* workspace, int64_t threads)
      : layer(p), p(p), panels(layer.panels) {
    Arena arena(workspace);
    // A weight that is read once is packed while it is read, so that it stays in a cache. For few
    // rows it is read in place, and so are W_hh and W_hr if there are a few steps. Groups of rows
    // share packed weights. Without h0 the first step has no product with W_hh.
    const int64_t width = panels.width();
    const int64_t rows = layer.group_rows(), tokens = layer.chunk * rows;
    const int64_t products = p.steps - first_product();
    const bool ih_once = p.groups == 1 && p.steps <= layer.chunk,
               hh_unkept = p.groups == 1 &&
        (products <= 1 ||
         (layer.reads_in_place(rows) &&
          products <= products_worth_reading_in_place<E>(rows, layer.hh_bytes())));
    layer.take_weights(
        arena, !ih_once, !hh_unkept, layer.projected && !(hh_unkept && layer.reads_in_place(rows)));
    for (int64_t j = 0; j < p.directions * p.groups; ++j) {
      Job& job = jobs[j];
      job.tokens = arena.take<S>(left_rows_of<E>(tokens) * layer.x_ld());
      job.input_products = arena.take<T>(panels.count * tokens * width);
      job.h[0] = arena.take<S>(left_rows_of<E>(rows) * layer.h_ld());
      job.h[1] = arena.take<S>(left_rows_of<E>(rows) * layer.h_ld());
      job.reset_h = arena.take<S>(panels.resets_first ? left_rows_of<E>(rows) * layer.h_ld() : 0);
      job.keeps = arena.take<T>(p.recurrent_dropout.threshold ? rows * layer.h_ld() : 0);
      job.c = arena.take<T>(panels.count * rows * kUnits);
      job.m = arena.take<S>(layer.projected ? left_rows_of<E>(rows) * layer.m_ld() : 0);
      job.m_products = arena.take<T>(layer.projected ? tiles(p.R) * rows * kTile : 0);
      job.hidden_products = arena.take<T>(layer.norm ? panels.count * rows * width : 0);
      job.cells = arena.take<T>(layer.norm ? panels.count * rows * kUnits : 0);
      job.moments = arena.take<T[2]>(layer.norm ? panels.count * tokens : 0);
      job.cell_moments = arena.take<T[2]>(layer.norm ? panels.count * rows : 0);
    }
    row_buffers = arena.take<E>(threads * layer.row_buffer_size());
    const bool packs =
        (ih_once && !layer.reads_in_place(tokens)) || (hh_unkept && !layer.reads_in_place(rows));
    own_panels = arena.take<E>(packs ? threads * layer.panel_size() : 0);
    statistics = arena.take<Statistics<T>>(layer.norm ? threads * (tokens + rows) : 0);
    words = arena.take<uint64_t>(threads * 2 * rows);
    bytes = arena.used();
  }

  void run(const Crew& crew, int64_t index) {
    layer.row_buffer = row_buffers + index * layer.row_buffer_size();
    if (own_panels) layer.panel = own_panels + index * layer.panel_size();
    const int64_t rows = layer.group_rows();
    ih_statistics = statistics + index * (layer.chunk + 1) * rows;
    row_statistics = ih_statistics + layer.chunk * rows;
    words_h = words + index * 2 * rows;
    words_c = words_h + rows;
    const Team all = crew.all(index);
    layer.pack(all, /*hh=*/!packs_late());
    all.wait();
    crew.share_jobs(index, p.directions * p.groups, [&](int64_t job, const Team& team) {
      run_job({p, job / p.groups, job % p.groups, p.groups}, jobs[job], team);
    });
  }

  int64_t bytes;  // of the workspace

 private:
  struct Job {
    S* tokens;             // [tokens][x_ld]: rows of the input
    T* input_products;     // [panels][tokens][width]
    S* h[2];               // [rows][h_ld]: step s reads h[s % 2] and writes the other one
    S* reset_h;            // [rows][h_ld]: r h
    T* keeps;              // [rows][h_ld]: 0 where recurrent dropout drops, else 1
    T* c;                  // [panels][rows][16]
    S* m;                  // [rows][m_ld]
    T* m_products;         // [tiles][rows][64]
    T* hidden_products;    // [panels][rows][width]
    T* cells;              // [panels][rows][16]: clipped cells of the current step
    T (*moments)[2];       // [panels][tokens]
    T (*cell_moments)[2];  // [panels][rows]
  };

  // The sequence ---------------------------------------------------------------------------------

  // Returns the first step that multiplies by W_hh: without h0, h is 0 in the first.
  int64_t first_product() const { return p.direction[0].h0 || layer.norm ? 0 : 1; }
  // Returns whether a thread packs each of its panels of W_hh just before the panel's first
  // product, which then reads it from a cache. Groups of rows share panels, and so need them
  // earlier.
  bool packs_late() const { return p.groups == 1 && !layer.norm; }

  void run_job(const RowGroup& group, const Job& job, const Team& team) {
    begin(group, job, team);
    const Range own = team.share(panels.count);
    for (int64_t s0 = 0; s0 < p.steps; s0 += layer.chunk) {
      const int64_t s1 = std::min(s0 + layer.chunk, p.steps);
      layer.gather(group, team, s0, s1, job.tokens);
      team.wait();
      compute_input_products(group, job, team, own, s0, s1);
      T* products = job.input_products;
      int64_t token = 0;
      for (int64_t s = s0; s < s1; ++s) {
        if (layer.norm) normalised_step(group, job, team, own, s, products, token);
        else if (panels.resets_first) reset_first_step(group, job, team, own, s, products);
        else step(group, job, own, s, products);
        if (layer.projected) {
          team.wait();
          project(group, job, team, s);
        }
        team.wait();
        products += group.active(s) * panels.width();
        token += group.active(s);
      }
    }
    finish(group, job, team);
  }

  // Sets the state before the first step, and zeros past every row's last step.
  void begin(const RowGroup& group, const Job& job, const Team& team) {
    const Range own = team.share(group.rows());
    for (int64_t i = own.first; i < own.last; ++i) {
      S* h = job.h[0] + i * layer.h_ld();
      std::fill_n(h, layer.h_ld(), S(0));
      std::fill_n(job.h[1] + i * layer.h_ld(), layer.h_ld(), S(0));
      if (job.reset_h) std::fill_n(job.reset_h + i * layer.h_ld(), layer.h_ld(), S(0));
      if (const S* h0 = group.template h<S>(i, -1)) std::copy_n(h0, p.R, h);
      if (job.keeps) {
        for (int64_t c = 0; c < p.R; c += 64) {
          const uint64_t kept =
              group.kept(p.recurrent_dropout, RowGroup::RecurrentDropout, i, 0, c);
          for (int64_t k = 0; k < kTile; ++k)
            job.keeps[i * layer.h_ld() + c + k] = static_cast<T>(kept >> k & 1);
        }
        for (int64_t c = 0; c < p.R; ++c)
          h[c] = static_cast<S>(static_cast<T>(h[c]) * job.keeps[i * layer.h_ld() + c]);
      }
      layer.store_units(group.template c<T>(i, -1), i, job.c);
      if (job.m) std::fill_n(job.m + i * layer.m_ld(), layer.m_ld(), S(0));
      for (int64_t t = group.length(i); t < p.T; ++t)
        std::fill_n(
            static_cast<S*>(p.output) +
                ((t * p.B + group.row(i)) * p.directions + group.index) * p.R,
            p.R, S(0));
    }
  }

  // Writes the last states. c does not change past a row's end.
  void finish(const RowGroup& group, const Job& job, const Team& team) {
    const Range own = team.share(group.rows());
    for (int64_t i = own.first; i < own.last; ++i) {
      if (group.d.h_n) {
        S* h_n = static_cast<S*>(group.d.h_n) + group.row(i) * p.R;
        if (const S* h = group.template h<S>(i, group.length(i) - 1)) std::copy_n(h, p.R, h_n);
        else std::fill_n(h_n, p.R, S(0));
      }
      if (group.d.c_n)
        layer.load_units(job.c, i, static_cast<T*>(group.d.c_n) + group.row(i) * p.H);
    }
  }

  // Computes W_ih x for this thread's panels, and adds the biases or takes the statistics.
  void compute_input_products(
      const RowGroup& group, const Job& job, const Team& team, const Range& own, int64_t s0,
      int64_t s1) {
    const int64_t width = panels.width(), stride = layer.chunk * layer.group_rows() * width;
    int64_t tokens = 0;
    for (int64_t s = s0; s < s1; ++s) tokens += group.active(s);
    for (int64_t q = own.first, multiplied = q; q < own.last; ++q) {
      T* target = job.input_products + q * stride;
      if (q == multiplied)
        multiplied +=
            layer.multiply_inputs(group.index, q, own.last, tokens, job.tokens, target, stride);
      if (layer.norm)
        take_moments(
            target, width, tokens, panels.blocks, units_of(p, q),
            job.moments + q * layer.chunk * layer.group_rows());
    }
    if (layer.norm) {
      team.wait();
      combine_moments<T>(
          p, job.moments, layer.chunk * layer.group_rows(), tokens, panels.blocks, ih_statistics);
      team.wait();  // before a step's moments overwrite these
    }
  }

  // Adds these blocks of the product with W_hh to this thread's panels of the product with W_ih,
  // and calls f(q, tile, starts) for each panel q while its tile is in the L1 cache. `starts`:
  // panel q is the first of its 64 columns. Steps alternate between reading panels forwards and
  // backwards, so that the part of W_hh that a cache still holds is read first.
  template <class F>
  void add_products(
      const RowGroup& group, const Range& own, int64_t s, const S* h, const Panels::Blocks& blocks,
      T* input_products, const F& f) {
    const int64_t stride = layer.chunk * layer.group_rows() * panels.width();
    const bool descends = s % 2 == 1 && blocks.count > 1;  // several panels at once run forwards
    const bool multiplies = s >= first_product();
    const bool packs = s == first_product() && packs_late() && layer.weights[group.index].hh;
    if (packs && blocks.count == 1) layer.keep_hh_panels(group.index, own, blocks);
    const int64_t count = own.last - own.first;
    for (int64_t k = 0, multiplied = 0, before = -1; k < count; ++k) {
      const int64_t q = descends ? own.last - 1 - k : own.first + k;
      T* tile = input_products + q * stride;
      if (packs && blocks.count > 1) layer.keep_hh_panels(group.index, {q, q + 1}, blocks);
      if (multiplies && k == multiplied)
        multiplied += layer.multiply_hiddens(
            group.index, q, descends ? q + 1 : own.last, group.active(s), h, blocks, tile, stride);
      f(q, tile, q / 4 != before);
      before = q / 4;
    }
  }

  void step(const RowGroup& group, const Job& job, const Range& own, int64_t s, T* input_products) {
    const int64_t rows = group.active(s);
    const auto cells = [&](int64_t q, T* tile, bool starts) TRIFUSE_INLINE {
      if (starts) draw(group, q, s);
      for (int64_t i = 0; i < rows; ++i) {
        const T* row = tile + i * panels.width();
        if (p.cell != Cell::Lstm) {
          if (p.cell == Cell::Gru) gru_cell(group, job, q, i, s, row);
          else rnn_cell(group, job, q, i, s, row);
          continue;
        }
        U a[4];
        for (int b = 0; b < panels.blocks; ++b) a[b] = U::load(row + b * kUnits);
        const U c_old = U::load(job.c + layer.unit_row(q, i));
        const LstmGates gates = layer.activate(group, q, a, c_old);
        store_clipped(group, q, i, s, gates);
        store_state(group, job, q, i, s, gates, c_old, gates.o * tanh(gates.c));
      }
    };
    add_products(group, own, s, job.h[s % 2], panels.with_h(), input_products, cells);
  }

  // A step of a GRU whose reset gate precedes the product with W_hn.
  void reset_first_step(
      const RowGroup& group, const Job& job, const Team& team, const Range& own, int64_t s,
      T* input_products) {
    const int64_t rows = group.active(s), width = panels.width();
    const S* h = job.h[s % 2];
    add_products(group, own, s, h, panels.with_h(), input_products, [&](int64_t q, T* tile, bool) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = i * layer.h_ld() + q * kUnits;
        T* row = tile + i * width;
        const U r = sigmoid(U::load(row)), z = sigmoid(U::load(row + kUnits));
        r.store(row);
        z.store(row + kUnits);
        only(units_of(p, q), r * U::load(h + at)).store(job.reset_h + at);
      }
    });
    team.wait();
    const Panels::Blocks candidate = panels.with_reset_h();
    const auto finish = [&](int64_t q, const T* tile, bool) {
      const int64_t units = units_of(p, q);
      for (int64_t i = 0; i < rows; ++i) {
        const T* row = tile + i * width;
        const U z = U::load(row + kUnits), n = tanh(U::load(row + 2 * kUnits));
        if (group.d.gates) {
          S* target = gates_row(group, i, s, 3) + q * kUnits * 3;
          U::load(row).store(target, units);
          z.store(target + units, units);
          n.store(target + 2 * units, units);
        }
        const U old = U::load(h + i * layer.h_ld() + q * kUnits);
        store_h(group, job, i, s, q * kUnits, units, multiply_add(z, old - n, n));
      }
    };
    add_products(group, own, s, job.reset_h, candidate, input_products, finish);
  }

  TRIFUSE_INLINE void store_clipped(
      const RowGroup& group, int64_t q, int64_t i, int64_t s, const LstmGates& gates) {
    if (group.d.clipped && p.cell_clip_words()) group.clipped(i, s)[q] = gates.clipped;
  }

  // Stores row i's units of panel q after step s.
  TRIFUSE_INLINE void store_state(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s,
      const LstmGates& gates, const U& c_old, const U& m) {
    const int64_t units = units_of(p, q);
    U c = gates.c;
    if (p.draw_c.threshold) c = choose(words_c[i] >> q % 4 * kUnits, c, c_old);
    else if (p.zoneout_c != 0 && !p.training)
      c = multiply_add(U(T(p.zoneout_c)), c_old, U(T(1 - p.zoneout_c)) * c);
    c.store(job.c + layer.unit_row(q, i));
    if (group.d.cells) c.store(group.template cells<T>(i, s) + q * kUnits, units);
    if (group.d.gates && !layer.norm) {
      S* row = gates_row(group, i, s, panels.blocks) + q * kUnits * panels.blocks;
      gates.i.store(row, units);
      if (!p.coupled) gates.f.store(row + units, units);
      gates.g.store(row + (panels.blocks - 2) * units, units);
      gates.o.store(row + (panels.blocks - 1) * units, units);
    }
    if (layer.projected) only(units, m).store(job.m + i * layer.m_ld() + q * kUnits);
    else store_h(group, job, i, s, q * kUnits, units, m);
  }

  S* gates_row(const RowGroup& group, int64_t i, int64_t s, int64_t blocks) {
    return static_cast<S*>(group.d.gates) +
        (group.position(i, s) * p.B + group.row(i)) * p.H * blocks;
  }

  // Stores row i's new h in `units` columns from `column` on.
  TRIFUSE_INLINE void store_h(
      const RowGroup& group, const Job& job, int64_t i, int64_t s, int64_t column, int64_t units,
      U h) {
    if (p.draw_h.threshold || (p.zoneout_h != 0 && !p.training)) {
      const S* row = group.template h<S>(i, s - 1);
      const U old = row ? U::load(row + column, units) : U(T(0));
      h = p.draw_h.threshold ? choose(words_h[i] >> column % 64, h, old)
                             : multiply_add(U(T(p.zoneout_h)), old, U(T(1 - p.zoneout_h)) * h);
    }
    if constexpr (std::is_same_v<S, float>)  // the type to which 16-bit types are widened
      if (p.rounding != DType::Float32) h = rounded(h);
    h.store(group.template output<S>(p.output, i, s) + column, units);
    if (job.keeps) {
      h = h * U::load(job.keeps + i * layer.h_ld() + column);
    }
    only(units, h).store(job.h[(s + 1) % 2] + i * layer.h_ld() + column);
  }

  // Clears the lanes past the last unit. A product there is NaN if a factor is infinite, and a pair
  // in the next product may read the first of them.
  static U only(int64_t units, const U& x) {
    return units == kUnits ? x : choose(low_bits(units), x, U(T(0)));
  }

  U rounded(const U& h) const {
    T value[kUnits];
    h.store(value);
    for (T& x : value)
      x = p.rounding == DType::Float16 ? static_cast<T>(static_cast<c10::Half>(x))
                                       : static_cast<T>(static_cast<c10::BFloat16>(x));
    return U::load(value);
  }

  // Draws zoneout's bits for the 64 columns that contain panel q.
  void draw(const RowGroup& group, int64_t q, int64_t s) {
    const int64_t column = q * kUnits / 64 * 64, rows = group.active(s);
    for (int64_t i = 0; i < rows; ++i) {
      if (p.draw_h.threshold && !layer.projected)
        words_h[i] = group.kept(p.draw_h, RowGroup::ZoneoutH, i, s, column);
      if (p.draw_c.threshold) words_c[i] = group.kept(p.draw_c, RowGroup::ZoneoutC, i, s, column);
    }
  }

  void project(const RowGroup& group, const Job& job, const Team& team, int64_t s) {
    const int64_t rows = group.active(s), stride = layer.group_rows() * kTile;
    for_tiles(team, p.R, [&](int64_t tile, int64_t first, int64_t columns) {
      T* sums = job.m_products + tile * stride + first;
      const bool ahead = exceeds_cache<E>(tiles(p.R) * layer.hr_size());
      if (const E* packed = layer.weights[group.index].hr)
        product_with_packed<E>(
            rows, columns, elements<E>(p.H), as_elements<E>(job.m), elements_ld<E>(layer.m_ld()),
            packed + tile * layer.hr_size(), kTile, first, sums, kTile, false, ahead);
      else if constexpr (Layer<E>::kReadsInPlace)
        product_with_rows<E>(
            static_cast<const S*>(group.d.weight_hr) + (tile * kTile + first) * p.H,
            std::min(columns, p.R - tile * kTile - first), p.H, layer.row_buffer, rows,
            as_elements<E>(job.m), elements_ld<E>(layer.m_ld()), sums, kTile, ahead);
      for (int64_t i = 0; i < rows; ++i) {
        if (p.draw_h.threshold)
          words_h[i] = group.kept(p.draw_h, RowGroup::ZoneoutH, i, s, tile * kTile);
        for (int64_t c = 0; c < columns; c += kUnits) {
          U h = U::load(sums + i * kTile + c);
          const int64_t column = tile * kTile + first + c;
          if (std::isfinite(p.proj_clip)) {
            if (group.d.clipped)
              group.clipped(i, s)[p.cell_clip_words() + column / kUnits] =
                  clipped_bits(h, p.proj_clip);
            h = clip(h, p.proj_clip);
          }
          store_h(group, job, i, s, column, std::min(kUnits, p.R - column), h);
        }
      }
    });
  }

  void gru_cell(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, const T* row) {
    const int64_t units = units_of(p, q);
    const U h_product = U::load(row + 3 * kUnits);
    const U r = sigmoid(U::load(row + kUnits)), z = sigmoid(U::load(row + 2 * kUnits));
    const U n = tanh(multiply_add(r, h_product, U::load(row)));
    const U old = U::load(job.h[s % 2] + i * layer.h_ld() + q * kUnits);
    if (group.d.gates) {
      S* target = gates_row(group, i, s, 4) + q * kUnits * 4;
      n.store(target, units);
      r.store(target + units, units);
      z.store(target + 2 * units, units);
      h_product.store(target + 3 * units, units);
    }
    store_h(group, job, i, s, q * kUnits, units, multiply_add(z, old - n, n));
  }

  void rnn_cell(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, const T* row) {
    const int64_t units = units_of(p, q);
    const U a = U::load(row);
    store_h(group, job, i, s, q * kUnits, units, p.relu ? relu(a) : tanh(a));
  }

  // Layer normalisation --------------------------------------------------------------------------

  void normalised_step(
      const RowGroup& group, const Job& job, const Team& team, const Range& own, int64_t s,
      T* input_products, int64_t token) {
    const int64_t width = panels.width(), rows = group.active(s), capacity = layer.group_rows();
    const int last = panels.blocks - 1;
    const Weights& w = layer.weights[group.index];
    const auto hidden = [&](int64_t q) { return job.hidden_products + q * capacity * width; };
    const auto cells = [&](int64_t q) { return job.cells + q * capacity * kUnits; };
    for (int64_t q = own.first; q < own.last; ++q) {
      layer.template multiply_hidden<true>(
          group.index, q, rows, job.h[s % 2], panels.with_h(), hidden(q), false);
      take_moments(
          hidden(q), width, rows, panels.blocks, units_of(p, q), job.moments + q * capacity);
    }
    team.wait();
    combine_moments<T>(p, job.moments, capacity, rows, panels.blocks, row_statistics);
    for (int64_t q = own.first; q < own.last; ++q) {
      for (int64_t i = 0; i < rows; ++i) {
        T* row = hidden(q) + i * width;
        const T* x = input_products + (q * layer.chunk * capacity + i) * width;
        U a[4];
        layer.normalised_gates(
            group.index, q, x, ih_statistics[token + i], row, row_statistics[i], a);
        if (group.d.gates) {
          // Rows are too far apart for the hardware to predict where the next panel's products are
          // written.
          prefetch_strip<true>(layer.kept_products(group, q + 1, i, s));
          prefetch_strip<true>(layer.kept_products(group, q + 1, i, s) + kStrip);
          const int64_t units = units_of(p, q);
          T* kept = layer.kept_products(group, q, i, s);
          for (int b = 0; b < panels.blocks; ++b) {
            U::load(x + b * kUnits).store(kept + b * units, units);
            U::load(row + b * kUnits).store(kept + (panels.blocks + b) * units, units);
          }
        }
        const LstmGates gates = layer.activate(group, q, a, U::load(job.c + layer.unit_row(q, i)));
        store_clipped(group, q, i, s, gates);
        // Kept in the memory of the products until the cells of all units are known.
        gates.i.store(row);
        if (!p.coupled) gates.f.store(row + kUnits);
        gates.g.store(row + (last - 1) * kUnits);
        gates.o.store(row + last * kUnits);
        gates.c.store(cells(q) + i * kUnits);
      }
      take_moments(cells(q), kUnits, rows, 1, units_of(p, q), job.cell_moments + q * capacity);
    }
    team.wait();
    combine_moments<T>(p, job.cell_moments, capacity, rows, 1, row_statistics);
    for (int64_t q = own.first; q < own.last; ++q) {
      if (q % 4 == 0 || q == own.first) draw(group, q, s);
      for (int64_t i = 0; i < rows; ++i) {
        const T* row = hidden(q) + i * width;
        const LstmGates gates = {
            U::load(row), U::load(row + kUnits), U::load(row + (last - 1) * kUnits),
            U::load(row + last * kUnits), U::load(cells(q) + i * kUnits)};
        const U normalised = multiply_add(
            row_statistics[i].normalise(gates.c), U::load(w.norm_cell + q * kUnits),
            U::load(w.norm_cell + layer.m_ld() + q * kUnits));
        store_state(
            group, job, q, i, s, gates, U::load(job.c + layer.unit_row(q, i)),
            gates.o * tanh(normalised));
      }
    }
  }

  Layer<E> layer;
  const LstmProblem& p;
  const Panels& panels;
  Job jobs[LstmProblem::kMaxDirections * LstmProblem::kMaxGroups];
  E *row_buffers, *own_panels;
  Statistics<T>* statistics;
  uint64_t* words;
  // This thread's memory.
  Statistics<T>* ih_statistics;   // [tokens]
  Statistics<T>* row_statistics;  // [rows]
  uint64_t *words_h, *words_c;    // [rows]: bits of 64 columns, set for the new state
};

int64_t workspace(const LstmProblem& p, int64_t threads) {
  return for_element(p, [&]<class E>() { return Forward<E>(p, nullptr, threads).bytes; });
}

void run(const LstmProblem& p, void* memory, int64_t threads, const Crew& crew, int64_t index) {
  [[maybe_unused]] const MatrixUnit unit;
  for_element(p, [&]<class E>() { Forward<E>(p, memory, threads).run(crew, index); });
}

}  // namespace

LstmForward lstm_forward() { return {kPack<Compute<c10::BFloat16>::Element> == 2, workspace, run}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
