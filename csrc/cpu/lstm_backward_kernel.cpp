// LSTM and GRU backward on a CPU.
//
// As in the forward, teams of threads go through the steps of a direction, or of a group of its
// rows, now from the last step to the first. At each step a thread first owns columns of dh: it
// multiplies the gate gradients of the step after, of all units, by its panels of W_hh^T. After a
// barrier it owns hidden units: it computes the gradients of their gates from dh, or with a
// projection from dm = dq W_hr. After another barrier the next step begins. The gate gradients of
// all steps are kept, panel by panel. When all steps are done, the gradients of the weights and the
// input are products over all tokens, cut into tasks that any thread may take. A task owns the rows
// of a weight's gradient that belong to a panel, or some hundred tokens of the input's gradient.
//
// Gates that the forward did not save are recomputed for about 128 tokens at a time, or for all if
// they are few, by the forward's products in the forward's order, so to the same bits. With layer
// normalisation they are recomputed from the saved products, if there are any.
//
// Each element is a fixed chain of multiply-adds whatever the number of threads. Sums over tokens
// are cut at fixed numbers of tokens.
//
// Floor: 2 · G·H · (I + R) (+ 2 · R · H) operations a token, twice, on the multiply-add pipes; or
// where rows are few, the bytes of W_hh at each step.

#include "cpu/kernels.h"
#include "cpu/long_sum.h"
#include "cpu/lstm_layer.h"
#include "cpu/row.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class E>
class Backward : Layer<E> {
  using Base = Layer<E>;
  using typename Base::S, typename Base::T, typename Base::U, typename Base::LstmGates,
      typename Base::Weights;
  using Base::p, Base::panels, Base::norm, Base::projected, Base::chunk, Base::weights,
      Base::scratch;
  using Base::group_rows, Base::tiles, Base::x_ld, Base::h_ld, Base::m_ld, Base::as_elements,
      Base::elements_ld, Base::hr_size, Base::scratch_size, Base::pack, Base::activate,
      Base::multiply_hidden;

 public:
  Backward(const LstmProblem& p, void* workspace, int64_t threads, int64_t index)
      : Base(p), recomputes_gates(p.cell == Cell::Lstm && (norm || !p.direction[0].gates)),
        recomputes_products(p.cell == Cell::Lstm && !p.direction[0].gates),
        tokens(p.start[p.steps]), once(recomputes_products && p.groups == 1 && p.steps <= chunk),
        chunk_tokens(once ? tokens : chunk * group_rows()) {
    Arena arena(workspace);
    const int64_t rows = group_rows(), width = panels.width();
    // Weights that are read once are packed while they are read.
    const bool keep_weights = recomputes_products && !once;
    this->take_weights(arena, keep_weights, keep_weights, false);
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      Sequence& q = sequences[d];
      // With one step W_hh is needed only for the gradient of h0.
      q.hh = arena.take<E>(p.steps > 1 || direction.grad_h0 ? tiles(p.R) * hh_back_size() : 0);
      q.hr = arena.take<E>(projected ? tiles(p.H) * hr_back_size() : 0);
      q.da = arena.take<S>(panels.count * tokens * width);
      q.dax = norm ? arena.take<S>(panels.count * tokens * width) : q.da;
      q.dq = arena.take<S>(projected ? tiles(p.R) * tokens * kTile : 0);
      q.m = arena.take<S>(projected ? tiles(p.H) * tokens * kTile : 0);
      q.x = arena.take<E>(direction.grad_weight_ih ? tiles(p.I) * elements<E>(tokens) * kTile : 0);
      q.h = arena.take<E>(direction.grad_weight_hh ? tiles(p.R) * elements<E>(tokens) * kTile : 0);
      q.peephole = TokenSums(arena, direction.weight_peephole ? 3 * m_ld() : 0);
      q.bias = TokenSums(arena, norm ? 3 * panels.count * width : 0);
      q.cell = TokenSums(arena, norm ? 2 * m_ld() : 0);
    }
    for (int64_t j = 0; j < p.directions * p.groups; ++j) {
      Job& job = jobs[j];
      job.da = arena.take<S>(rows * da_ld());
      job.dh = arena.take<T>(rows * h_ld());
      job.kept_dh = arena.take<T>(p.cell == Cell::Gru || p.zoneout_h != 0 ? rows * h_ld() : 0);
      job.multiplier = arena.take<T>(p.recurrent_dropout.threshold ? rows * h_ld() : 0);
      job.dq = arena.take<S>(projected ? rows * h_ld() : 0);
      job.dc = arena.take<T>(panels.count * rows * kUnits);
      job.x = arena.take<S>(recomputes_products ? chunk_tokens * x_ld() : 0);
      job.h = arena.take<S>(recomputes_products ? chunk_tokens * h_ld() : 0);
      const bool apart = recomputes_gates && !products_in_da();
      job.products = arena.take<T>(apart ? panels.count * chunk_tokens * width : 0);
      if constexpr (std::is_same_v<S, T>)
        if (products_in_da()) job.products = sequences[j].da;
      job.hidden_products = arena.take<T>(norm ? panels.count * chunk_tokens * width : 0);
      job.gates = arena.take<T>(norm ? panels.count * chunk_tokens * width : 0);
      job.cells = arena.take<T>(norm ? panels.count * chunk_tokens * kUnits : 0);
      for (auto& moments : job.moments)
        moments = arena.take<T[2]>(norm ? panels.count * chunk_tokens : 0);
      job.sums = arena.take<T[4]>(norm ? panels.count * rows : 0);
      job.grads = arena.take<T>(norm ? panels.count * rows * width : 0);
    }
    for (int64_t t = 0; t < threads; ++t) {
      Own piece;
      piece.scratch = arena.take<E>(scratch_size());
      piece.panel = arena.take<E>(once ? this->panel_size() : 0);
      piece.dm = arena.take<T>(projected ? rows * kTile : 0);
      piece.words = arena.take<uint64_t>(rows);
      for (auto& statistics : piece.statistics)
        statistics = arena.take<Statistics<T>>(norm ? chunk_tokens : 0);
      piece.means = arena.take<T[4]>(norm ? rows : 0);
      const int64_t column = kPack<E> == 2 ? elements<E>(tokens) * kTile : 0;
      piece.packed_a = arena.take<E>(std::max(column, kInputTokens * input_depth()));
      piece.packed_b = arena.take<E>(std::max(column, input_depth() * kTile));
      piece.sums = arena.take<T>(kInputTiles * kInputTokens * kTile);
      if (t == index) own = piece;
    }
    bytes = arena.used();
    scratch = own.scratch;
    this->panel = own.panel;
  }

  void run(const Crew& crew, int64_t index) {
    const Team all = crew.all(index);
    if (recomputes_gates || p.direction[0].weight_peephole) pack(all);
    begin(all);
    all.wait();
    crew.share_jobs(index, p.directions * p.groups, [&](int64_t job, const Team& team) {
      run_job({p, job / p.groups, job % p.groups, p.groups}, jobs[job], team);
    });
    all.wait();
    crew.share_tasks(tasks(), [&](int64_t task) { run_task(task); });
  }

  int64_t bytes;  // of the workspace

 private:
  // The most that a task owns: tiles of columns of a weight's gradient; tokens and tiles of the
  // input's.
  static constexpr int64_t kGroupTiles = 8, kInputTokens = 320, kInputTiles = 4;
  static constexpr int64_t kFlatRows = 12;  // rows of a gradient at once, with few tokens

  // Sums over tokens, added to step by step.
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

  // One direction's tensors over all steps. Tokens are numbered step by step.
  struct Sequence {
    E* hh;   // [tiles of R][k][64]: rows of W_hh in the order of panels
    E* hr;   // [tiles of H][k][64]: rows of W_hr
    S* da;   // [panels][tokens][width]: gradients of W_hh's product; in a GRU all four blocks
    S* dax;  // gradients of W_ih's product; the same as da unless products are normalised
    S* dq;   // [tiles of R][tokens][64]: gradients of W_hr's product
    S* m;    // [tiles of H][tokens][64]
    E* x;    // [tiles of I][tokens][64]: B of W_ih's gradient
    E* h;    // [tiles of R][tokens][64]: h before each step, B of W_hh's gradient
    TokenSums peephole;  // [3][units]
    TokenSums bias;      // [3][panels][width]: gradients of the bias and of both norms' weights
    TokenSums cell;      // [2][units]: gradients of the cell norm's weight and bias
  };

  struct Job {
    S* da;          // [rows][da_ld]: a step's gate gradients in the order of panels
    T* dh;          // [rows][h_ld]: gradient of h, then of h~ (without a projection, m)
    T* kept_dh;     // [rows][h_ld]: the part of dh that bypasses the cell to the previous h
    T* multiplier;  // [rows][h_ld]: D with its factor
    S* dq;          // [rows][h_ld]
    T* dc;          // [panels][rows][16]
    // For the steps whose gates are recomputed:
    S *x, *h;            // [tokens][x_ld], [tokens][h_ld]
    T* products;         // [panels][tokens][width]: W_ih x + W_hh h + bias; with a norm W_ih x
    T* hidden_products;  // [panels][tokens][width]: W_hh h; with a norm only
    T* gates;            // [panels][tokens][width]: i, f, g, o of a layer-norm LSTM
    T* cells;            // [panels][tokens][16]: its c~
    T (*moments[3])[2];  // [panels][tokens]: of W_ih's products, of W_hh's, of the cells
    T (*sums)[4];        // [panels][rows]: a panel's part of sums over a row
    T* grads;            // [panels][rows][width]: gradients of a
  };

  // One thread's memory.
  struct Own {
    E *scratch, *panel;
    T* dm;                         // [rows][64]
    uint64_t* words;               // [rows]: bits of 64 columns
    Statistics<T>* statistics[3];  // [tokens], in the order of Job::moments
    T (*means)[4];                 // [rows]
    E *packed_a, *packed_b;        // operands of a task
    T* sums;                       // [tiles][tokens][64]
  };

  // Returns whether recomputed products are stored in da, where the gate gradients overwrite them.
  bool products_in_da() const { return std::is_same_v<S, T> && once && !norm; }
  int64_t depth() const { return panels.count * panels.hh_width(); }
  int64_t hh_back_size() const { return elements<E>(depth()) * kTile; }
  int64_t hr_back_size() const { return elements<E>(p.R) * kTile; }
  // Padded: rows a multiple of a cache way's size apart would evict one another.
  int64_t da_ld() const { return depth() + 2 * kUnits; }
  int64_t input_depth() const { return elements<E>(2 * panels.ih_width()); }

  // Before the first step -------------------------------------------------------------------------

  void begin(const Team& team) {
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      const Sequence& sequence = sequences[d];
      const RowGroup group{p, d};
      Range share = team.share(tiles(p.R));
      for (int64_t tile = share.first; tile < share.last; ++tile) {
        if (sequence.hh) pack_hidden(direction, tile, sequence.hh + tile * hh_back_size());
        if (sequence.h) pack_tokens(group, tile, p.R, true, sequence.h);
      }
      share = team.share(sequence.hr ? tiles(p.H) : 0);
      for (int64_t tile = share.first; tile < share.last; ++tile)
        copy_right_rows<E>(
            Rows<S>{static_cast<const S*>(direction.weight_hr) + tile * kTile, p.H, 1}, p.R,
            std::min(kTile, p.H - tile * kTile), kTile, sequence.hr + tile * hr_back_size());
      share = team.share(sequence.x ? tiles(p.I) : 0);
      for (int64_t tile = share.first; tile < share.last; ++tile)
        pack_tokens(group, tile, p.I, false, sequence.x);
      if (team.index == 0) {
        sequence.peephole.clear();
        sequence.bias.clear();
        sequence.cell.clear();
      }
    }
    if (p.grad_input) {
      const Range rows = team.share(p.B);
      for (int64_t r = rows.first; r < rows.last; ++r)
        for (int64_t t = p.length[r]; t < p.T; ++t)
          std::fill_n(static_cast<S*>(p.grad_input) + (t * p.B + p.order[r]) * p.I, p.I, S(0));
    }
  }

  void pack_hidden(const LstmDirection& direction, int64_t tile, E* target) {
    const int64_t columns = std::min(kTile, p.R - tile * kTile);
    for (int64_t q = 0; q < panels.count; ++q)
      for (int b = panels.hh_first; b < panels.hh_first + panels.hh_blocks; ++b) {
        const S* rows = static_cast<const S*>(direction.weight_hh) +
            (panels.hh_gate[b] * p.H + q * kUnits) * p.R;
        pack_unit_rows<E>(rows, p.R, units_of(p, q), tile * kTile, columns, target);
        target += elements<E>(kUnits) * kTile;
      }
  }

  // Packs 64 columns of all tokens' x, or of h before their steps.
  void pack_tokens(const RowGroup& group, int64_t tile, int64_t width, bool hidden, E* panels_of) {
    E* target = panels_of + tile * elements<E>(tokens) * kTile;
    const int64_t first = tile * kTile, columns = std::min(kTile, width - first);
    alignas(64) S rows[kTile * kTile];
    int64_t i = 0, s = 0;
    for (int64_t token = 0; token < tokens; token += kTile) {
      const int64_t count = std::min(kTile, tokens - token);
      for (int64_t k = 0; k < count; ++k, ++i) {
        if (i == group.active(s)) {
          i = 0;
          ++s;
        }
        S* row = rows + k * kTile;
        if (hidden) copy_hidden(group, i, s, first, columns, row);
        else this->copy_input(group, i, s, first, columns, row);
      }
      copy_right_rows<E>(
          Rows<S>{rows, kTile, 1}, count, columns, kTile, target + elements<E>(token) * kTile);
    }
  }

  // Copies columns of h before step s, with zeros where recurrent dropout has them.
  void copy_hidden(
      const RowGroup& group, int64_t i, int64_t s, int64_t first, int64_t columns, S* target) {
    const S* h = group.template h<S>(i, s - 1);
    if (!h) {
      std::fill_n(target, columns, S(0));
      return;
    }
    std::copy_n(h + first, columns, target);
    if (p.recurrent_dropout.threshold) {
      const uint64_t kept =
          group.kept(p.recurrent_dropout, RowGroup::RecurrentDropout, i, 0, first);
      for (int64_t k = 0; k < columns; ++k)
        if (!(kept >> k & 1)) target[k] = S(0);
    }
  }

  // The sequence ----------------------------------------------------------------------------------

  void run_job(const RowGroup& group, const Job& job, const Team& team) {
    begin_job(group, job, team);
    team.wait();
    for (int64_t s1 = p.steps; s1 > 0;) {
      const int64_t s0 = std::max<int64_t>(s1 - chunk, 0);
      if (recomputes_gates) recompute(group, job, team, s0, s1);
      for (int64_t s = s1 - 1; s >= s0; --s) {
        hidden_gradients(group, job, team, s);
        team.wait();
        gate_gradients(group, job, team, s, s0);
        team.wait();
      }
      s1 = s0;
    }
    if (group.d.grad_h0) hidden_gradients(group, job, team, -1);
    if (group.d.grad_c0) {
      const Range rows = team.share(group.rows());
      for (int64_t i = rows.first; i < rows.last; ++i)
        this->load_units(job.dc, i, static_cast<T*>(group.d.grad_c0) + group.row(i) * p.H);
    }
  }

  void begin_job(const RowGroup& group, const Job& job, const Team& team) {
    const Range own_rows = team.share(group.rows());
    for (int64_t i = own_rows.first; i < own_rows.last; ++i) {
      const T* dc = static_cast<const T*>(group.d.grad_c_n);
      this->store_units(dc ? dc + group.row(i) * p.H : nullptr, i, job.dc);
      if (job.multiplier)
        for (int64_t c = 0; c < p.R; c += kTile) {
          const uint64_t kept =
              group.kept(p.recurrent_dropout, RowGroup::RecurrentDropout, i, 0, c);
          for (int64_t k = 0; k < kTile; ++k)
            job.multiplier[i * h_ld() + c + k] =
                kept >> k & 1 ? static_cast<T>(p.recurrent_dropout.scale) : T(0);
        }
    }
  }

  // Computes this thread's columns of the gradient of h after step s, and splits it between h~ and
  // the previous h. Step -1 stands for h0.
  void hidden_gradients(const RowGroup& group, const Job& job, const Team& team, int64_t s) {
    const int64_t later = group.active(s + 1), rows = s < 0 ? group.rows() : group.active(s);
    for_tiles(team, p.R, [&](int64_t tile, int64_t first, int64_t columns) {
      if (later)
        product<E>(
            later, columns, elements<E>(depth()), as_elements(job.da), elements_ld(da_ld()), 1,
            sequences[group.index].hh + tile * hh_back_size() + first, kTile,
            job.dh + tile * kTile + first, h_ld(), false, far_away<E>(tiles(p.R) * hh_back_size()));
      for (int64_t i = 0; i < rows; ++i) {
        if (s >= 0 && p.draw_h.threshold)
          own.words[i] = group.kept(p.draw_h, RowGroup::ZoneoutH, i, s, tile * kTile);
        for (int64_t c = first; c < first + columns; c += kUnits) {
          const int64_t column = tile * kTile + c, count = std::min(kUnits, p.R - column);
          const int64_t at = i * h_ld() + column;
          U dh(T(0));
          if (i < later) {
            dh = U::load(job.dh + at);
            if (job.multiplier) dh = dh * U::load(job.multiplier + at);
            if (job.kept_dh) dh = dh + U::load(job.kept_dh + at);
          } else if (group.d.grad_h_n) {
            dh = U::load(
                static_cast<const S*>(group.d.grad_h_n) + group.row(i) * p.R + column, count);
          }
          if (s < 0) {
            dh.store(static_cast<S*>(group.d.grad_h0) + group.row(i) * p.R + column, count);
            continue;
          }
          dh = dh + U::load(group.template output<S>(p.grad_output, i, s) + column, count);
          split_dh(group, job, i, s, column, dh);
        }
      }
    });
  }

  void split_dh(const RowGroup& group, const Job& job, int64_t i, int64_t s, int64_t column, U dh) {
    const int64_t at = i * h_ld() + column;
    if (p.draw_h.threshold) {
      const uint64_t kept = own.words[i] >> column % kTile;
      choose(kept, U(T(0)), dh).store(job.kept_dh + at);
      dh = choose(kept, dh, U(T(0)));
    } else if (p.zoneout_h != 0 && !p.training) {
      (U(T(p.zoneout_h)) * dh).store(job.kept_dh + at);
      dh = U(T(1 - p.zoneout_h)) * dh;
    } else if (p.zoneout_h != 0) {
      U(T(0)).store(job.kept_dh + at);
    }
    if (!projected) {
      dh.store(job.dh + at);
      return;
    }
    if (std::isfinite(p.proj_clip))
      dh = choose(group.clipped(i, s)[p.cell_clip_words() + column / kUnits], U(T(0)), dh);
    dh.store(job.dq + at);
    S* dq = sequences[group.index].dq;
    dh.store(dq + (column / kTile * tokens + group.token(i, s)) * kTile + column % kTile);
  }

  // Returns how many tokens the steps [s0, s) have.
  static int64_t group_token(const RowGroup& group, int64_t s, int64_t s0) {
    int64_t token = 0;
    for (; s0 < s; ++s0) token += group.active(s0);
    return token;
  }

  // Computes the gate gradients of this thread's units at step s.
  void gate_gradients(
      const RowGroup& group, const Job& job, const Team& team, int64_t s, int64_t s0) {
    if (norm) return normalised_gate_gradients(group, job, team, s, s0);
    const int64_t token = group_token(group, s, s0);
    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      begin_tile(group, job, s, tile, first, columns);
      for (int64_t q = (tile * kTile + first) / kUnits; q * kUnits < tile * kTile + first + columns;
           ++q)
        for (int64_t i = 0; i < group.active(s); ++i) {
          fetch(group, q + 1, i, s);
          if (p.cell == Cell::Gru) {
            gru_gradients(group, job, q, i, s);
            continue;
          }
          const Gates g = gates_of(group, job, q, i, s, token + i);
          const U dm = grad_m(job, q, i), tanh_c = tanh(g.c);
          U da[4];
          const U dn = dm * g.o * (U(T(1)) - tanh_c * tanh_c);
          cell_backward(group, job, q, i, s, dm * tanh_c, dn, g, da);
          store_m(group, q, i, s, g.o * tanh_c);
          for (int b = 0; b < panels.blocks; ++b) {
            da[b].store(job.da + i * da_ld() + q * panels.width() + b * kUnits);
            da[b].store(all_steps(sequences[group.index].da, group, q, i, s) + b * kUnits);
          }
        }
    });
  }

  // Prefetches what row i's units of a panel are computed from, and the place of their gradients:
  // rows are too far apart for the hardware to predict. The panel need not exist.
  void fetch(const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    const int64_t token = group.position(i, s) * p.B + group.row(i);
    if (!recomputes_gates) {
      const S* gates =
          static_cast<const S*>(group.d.gates) + (token * p.H + q * kUnits) * panels.blocks;
      prefetch_strip(gates);
    }
    if (p.cell == Cell::Lstm && s > 0)
      __builtin_prefetch(group.template cells<T>(i, s - 1) + q * kUnits);
    prefetch_strip</*write=*/true>(all_steps(sequences[group.index].da, group, q, i, s));
  }

  S* all_steps(S* grads, const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    return grads + (q * tokens + group.token(i, s)) * panels.width();
  }

  // Computes the gradients of m from those of W_hr's product, and draws zoneout's bits.
  void begin_tile(
      const RowGroup& group, const Job& job, int64_t s, int64_t tile, int64_t first,
      int64_t columns) {
    if (projected)
      product<E>(
          group.active(s), columns, elements<E>(p.R), as_elements(job.dq), elements_ld(h_ld()), 1,
          sequences[group.index].hr + tile * hr_back_size() + first, kTile, own.dm + first, kTile,
          false, far_away<E>(tiles(p.H) * hr_back_size()));
    if (p.draw_c.threshold)
      for (int64_t i = 0; i < group.active(s); ++i)
        own.words[i] = group.kept(p.draw_c, RowGroup::ZoneoutC, i, s, tile * kTile);
  }

  U grad_m(const Job& job, int64_t q, int64_t i) const {
    return projected ? U::load(own.dm + i * kTile + q * kUnits % kTile)
                     : U::load(job.dh + i * h_ld() + q * kUnits);
  }

  void store_m(const RowGroup& group, int64_t q, int64_t i, int64_t s, const U& m) const {
    if (!projected) return;
    S* panel = sequences[group.index].m + q / 4 * tokens * kTile;
    m.store(panel + group.token(i, s) * kTile + q % 4 * kUnits);
  }

  // The forward's gates, and the previous cell.
  struct Gates : LstmGates {
    U c_old;
  };

  U cell_before(const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    const T* c = group.template c<T>(i, s - 1);
    return c ? U::load(c + q * kUnits, units_of(p, q)) : U(T(0));
  }

  Gates gates_of(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, int64_t token) const {
    const int64_t count = units_of(p, q);
    Gates g;
    g.c_old = cell_before(group, q, i, s);
    const int64_t at = (q * chunk_tokens + token) * panels.width();
    if (norm) {
      const T* row = job.gates + at;
      g.i = U::load(row);
      g.f = p.coupled ? U(T(1)) - g.i : U::load(row + kUnits);
      g.g = U::load(row + (panels.blocks - 2) * kUnits);
      g.o = U::load(row + (panels.blocks - 1) * kUnits);
    } else if (recomputes_gates) {
      U a[4];
      for (int b = 0; b < panels.blocks; ++b) a[b] = U::load(job.products + at + b * kUnits);
      static_cast<LstmGates&>(g) = activate(group, q, a, g.c_old);
    } else {
      const S* row = static_cast<const S*>(group.d.gates) +
          (group.position(i, s) * p.B + group.row(i)) * p.H * panels.blocks +
          q * kUnits * panels.blocks;
      g.i = U::load(row, count);
      g.f = p.coupled ? U(T(1)) - g.i : U::load(row + count, count);
      g.g = U::load(row + (panels.blocks - 2) * count, count);
      g.o = U::load(row + (panels.blocks - 1) * count, count);
    }
    if (p.zoneout_c == 0) {
      g.c = U::load(group.template cells<T>(i, s) + q * kUnits, count);
    } else {
      g.c = multiply_add(g.f, g.c_old, g.i * g.g);
      if (std::isfinite(p.cell_clip)) g.c = clip(g.c, p.cell_clip);
    }
    if (std::isfinite(p.cell_clip)) g.clipped = group.clipped(i, s)[q];
    return g;
  }

  // Computes the gradients of a, and of the previous cell, from grad_o and from grad_c, the
  // gradient that reaches c~ through tanh.
  void cell_backward(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, const U& grad_o,
      const U& grad_c, const Gates& g, U da[4]) {
    const U one(T(1));
    const T* peephole = weights[group.index].peephole + q * kUnits;
    const bool has_peephole = group.d.weight_peephole;
    T* carried = job.dc + this->unit_row(q, i);
    U dc = U::load(carried), dc_old(T(0));  // gradient of the previous cell
    if (p.draw_c.threshold) {
      const uint64_t kept = own.words[i] >> q % 4 * kUnits;
      dc_old = choose(kept, U(T(0)), dc);
      dc = choose(kept, dc, U(T(0)));
    } else if (p.zoneout_c != 0 && !p.training) {
      dc_old = U(T(p.zoneout_c)) * dc;
      dc = U(T(1 - p.zoneout_c)) * dc;
    }
    const U da_o = grad_o * g.o * (one - g.o);
    U du = dc + grad_c;
    if (has_peephole) du = multiply_add(da_o, U::load(peephole + 2 * m_ld()), du);
    if (std::isfinite(p.cell_clip)) du = choose(g.clipped, U(T(0)), du);
    const U da_i = du * (p.coupled ? g.g - g.c_old : g.g) * g.i * (one - g.i);
    const U da_f = du * g.c_old * g.f * (one - g.f);
    dc_old = multiply_add(du, g.f, dc_old);
    if (has_peephole) {
      const TokenSums& peephole_sums = sequences[group.index].peephole;
      T* sums = peephole_sums.run + q * kUnits;
      const auto add = [&](int gate, const U& da, const U& c) {
        multiply_add(da, c, U::load(sums + gate * m_ld())).store(sums + gate * m_ld());
      };
      dc_old = multiply_add(da_i, U::load(peephole), dc_old);
      add(0, da_i, g.c_old);
      if (!p.coupled) {
        dc_old = multiply_add(da_f, U::load(peephole + m_ld()), dc_old);
        add(1, da_f, g.c_old);
      }
      add(2, da_o, g.c);
      if (ends_run(group.token(i, s)))
        for (int gate = 0; gate < 3; ++gate)
          peephole_sums.end_run(gate * m_ld() + q * kUnits, kUnits);
    }
    dc_old.store(carried);
    da[0] = da_i;
    if (!p.coupled) da[1] = da_f;
    da[panels.blocks - 2] = du * g.i * (one - g.g * g.g);
    da[panels.blocks - 1] = da_o;
  }

  void gru_gradients(const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s) {
    const int64_t count = units_of(p, q), at = i * h_ld() + q * kUnits;
    const S* row = static_cast<const S*>(group.d.gates) +
        (group.position(i, s) * p.B + group.row(i)) * p.H * 4 + q * kUnits * 4;
    const U n = U::load(row, count), r = U::load(row + count, count);
    const U z = U::load(row + 2 * count, count), k = U::load(row + 3 * count, count);
    const S* h = group.template h<S>(i, s - 1);
    const U old = h ? U::load(h + q * kUnits, count) : U(T(0));
    const U one(T(1)), dh = U::load(job.dh + at);
    const U dn = dh * (one - z) * (one - n * n);
    const U da[4] = {dn, dn * k * r * (one - r), dh * (old - n) * z * (one - z), dn * r};
    (dh * z).store(job.kept_dh + at);
    for (int b = 0; b < 4; ++b) {
      if (b > 0) da[b].store(job.da + i * da_ld() + q * panels.hh_width() + (b - 1) * kUnits);
      da[b].store(all_steps(sequences[group.index].da, group, q, i, s) + b * kUnits);
    }
  }

  // Computed again --------------------------------------------------------------------------------

  void recompute(const RowGroup& group, const Job& job, const Team& team, int64_t s0, int64_t s1) {
    const int64_t count = group_token(group, s1, s0), capacity = chunk_tokens;
    const int64_t width = panels.width();
    const Range own_panels = team.share(panels.count);
    if (norm && !recomputes_products) {
      each_token(group, s0, s1, [&](int64_t i, int64_t s, int64_t token) {
        for (int64_t q = own_panels.first; q < own_panels.last; ++q) {
          const int64_t at = (q * capacity + token) * width, units = units_of(p, q);
          const T* kept = this->kept_products(group, q, i, s);
          for (int b = 0; b < panels.blocks; ++b) {
            U::load(kept + b * units, units).store(job.products + at + b * kUnits);
            U::load(kept + (panels.blocks + b) * units, units)
                .store(job.hidden_products + at + b * kUnits);
          }
        }
      });
    }
    if (recomputes_products) {
      this->gather(group, team, s0, s1, job.x);
      S* h = job.h;
      for (int64_t s = s0; s < s1; h += group.active(s++) * h_ld()) {
        const Range rows = team.share(group.active(s));
        for (int64_t i = rows.first; i < rows.last; ++i) {
          std::fill_n(h + i * h_ld(), h_ld(), S(0));
          for (int64_t c = 0; c < p.R; c += kTile)
            copy_hidden(group, i, s, c, std::min(kTile, p.R - c), h + i * h_ld() + c);
        }
      }
      team.wait();
      for (int64_t q = own_panels.first; q < own_panels.last; ++q) {
        T* input_products = job.products + q * capacity * width;
        T* hidden_products = norm ? job.hidden_products + q * capacity * width : input_products;
        this->multiply_input(group.index, q, count, job.x, input_products);
        multiply_hidden(group.index, q, count, job.h, hidden_products, !norm);
      }
    }
    if (norm) {
      for (int64_t q = own_panels.first; q < own_panels.last; ++q)
        for (int k = 0; k < 2; ++k)
          take_moments(
              (k ? job.hidden_products : job.products) + q * capacity * width, width, count,
              panels.blocks, units_of(p, q), job.moments[k] + q * capacity);
      team.wait();
      for (int k = 0; k < 2; ++k)
        combine_moments<T>(p, job.moments[k], capacity, count, panels.blocks, own.statistics[k]);
      for (int64_t q = own_panels.first; q < own_panels.last; ++q) {
        each_token(group, s0, s1, [&](int64_t i, int64_t s, int64_t token) {
          const int64_t at = (q * capacity + token) * width;
          U a[4];
          this->normalised_gates(
              group.index, q, job.products + at, own.statistics[0][token], job.hidden_products + at,
              own.statistics[1][token], a);
          const LstmGates g = activate(group, q, a, cell_before(group, q, i, s));
          g.i.store(job.gates + at);
          if (!p.coupled) g.f.store(job.gates + at + kUnits);
          g.g.store(job.gates + at + (panels.blocks - 2) * kUnits);
          g.o.store(job.gates + at + (panels.blocks - 1) * kUnits);
          g.c.store(job.cells + (q * capacity + token) * kUnits);
        });
        take_moments(
            job.cells + q * capacity * kUnits, kUnits, count, 1, units_of(p, q),
            job.moments[2] + q * capacity);
      }
      team.wait();
      combine_moments<T>(p, job.moments[2], capacity, count, 1, own.statistics[2]);
    }
  }

  // Calls f(row, step, token) for the tokens of the steps [s0, s1).
  template <class F>
  static void each_token(const RowGroup& group, int64_t s0, int64_t s1, const F& f) {
    int64_t token = 0;
    for (int64_t s = s0; s < s1; token += group.active(s++))
      for (int64_t i = 0; i < group.active(s); ++i) f(i, s, token + i);
  }

  // Layer normalisation ---------------------------------------------------------------------------

  U normalised_cell(const RowGroup& group, int64_t q, int64_t token, const U& c) const {
    const T* norm_cell = weights[group.index].norm_cell + q * kUnits;
    return multiply_add(
        own.statistics[2][token].normalise(c), U::load(norm_cell), U::load(norm_cell + m_ld()));
  }

  // Adds up the panels' sums, panel by panel, to means over `size` values.
  void combine_sums(const Job& job, int64_t rows, int64_t size) {
    for (int64_t i = 0; i < rows; ++i)
      for (int k = 0; k < 4; ++k) {
        T sum = 0;
        for (int64_t q = 0; q < panels.count; ++q) sum += job.sums[q * group_rows() + i][k];
        own.means[i][k] = sum / static_cast<T>(size);
      }
  }

  // Three passes: back through the cells' norm, the gates, and the products' norms. A pass needs
  // sums over rows from the one before.
  void normalised_gate_gradients(
      const RowGroup& group, const Job& job, const Team& team, int64_t s, int64_t s0) {
    const int64_t token = group_token(group, s, s0), rows = group.active(s);
    const int64_t width = panels.width(), capacity = group_rows(), size = panels.count * width;
    const Weights& w = weights[group.index];
    const Sequence& sequence = sequences[group.index];
    const Range share = team.share(panels.count);
    const auto grads = [&](int64_t q, int64_t i) { return job.grads + (q * capacity + i) * width; };
    const auto add_to = [](T* sums, const U& x) { (U::load(sums) + x).store(sums); };

    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      begin_tile(group, job, s, tile, first, columns);
      for (int64_t q = (tile * kTile + first) / kUnits; q * kUnits < tile * kTile + first + columns;
           ++q)
        for (int64_t i = 0; i < rows; ++i) {
          const Gates g = gates_of(group, job, q, i, s, token + i);
          const U tanh_c = tanh(normalised_cell(group, q, token + i, g.c));
          const U dm = grad_m(job, q, i), dn = dm * g.o * (U(T(1)) - tanh_c * tanh_c);
          const U n = own.statistics[2][token + i].normalise(g.c);
          store_m(group, q, i, s, g.o * tanh_c);
          add_to(sequence.cell.run + q * kUnits, dn * n);
          add_to(sequence.cell.run + m_ld() + q * kUnits, dn);
          if (ends_run(group.token(i, s)))
            for (int k = 0; k < 2; ++k) sequence.cell.end_run(k * m_ld() + q * kUnits, kUnits);
          const U grad_n = dn * U::load(w.norm_cell + q * kUnits);
          (dm * tanh_c).store(grads(q, i));
          grad_n.store(grads(q, i) + kUnits);
          T* sums = job.sums[q * capacity + i];
          sums[0] = grad_n.total();
          sums[1] = (grad_n * n).total();
        }
    });
    team.wait();
    combine_sums(job, rows, p.H);
    team.wait();  // before the products' sums overwrite these
    for (int64_t q = share.first; q < share.last; ++q) {
      if (p.draw_c.threshold)
        for (int64_t i = 0; i < rows; ++i)
          own.words[i] = group.kept(p.draw_c, RowGroup::ZoneoutC, i, s, q / 4 * kTile);
      for (int64_t i = 0; i < rows; ++i) {
        const Gates g = gates_of(group, job, q, i, s, token + i);
        const Statistics<T>& cell = own.statistics[2][token + i];
        const U grad_c = normalise_backward(
            U::load(grads(q, i) + kUnits), cell.normalise(g.c), cell.rstd, own.means[i][0],
            own.means[i][1]);
        U da[4];
        cell_backward(group, job, q, i, s, U::load(grads(q, i)), grad_c, g, da);
        U sums[4] = {U(T(0)), U(T(0)), U(T(0)), U(T(0))};
        for (int b = 0; b < panels.blocks; ++b) {
          const int64_t at = q * width + b * kUnits;
          const auto [x, h] = normalised_products(job, q, b, token + i);
          const U to_x = da[b] * U::load(w.norm_ih + at), to_h = da[b] * U::load(w.norm_hh + at);
          add_to(sequence.bias.run + at, da[b]);
          add_to(sequence.bias.run + size + at, da[b] * x);
          add_to(sequence.bias.run + 2 * size + at, da[b] * h);
          sums[0] = sums[0] + to_x;
          sums[1] = multiply_add(to_x, x, sums[1]);
          sums[2] = sums[2] + to_h;
          sums[3] = multiply_add(to_h, h, sums[3]);
          da[b].store(grads(q, i) + b * kUnits);
        }
        if (ends_run(group.token(i, s)))
          for (int k = 0; k < 3; ++k) sequence.bias.end_run(k * size + q * width, width);
        for (int k = 0; k < 4; ++k) job.sums[q * capacity + i][k] = sums[k].total();
      }
    }
    team.wait();
    combine_sums(job, rows, panels.blocks * p.H);
    for (int64_t q = share.first; q < share.last; ++q)
      for (int64_t i = 0; i < rows; ++i) {
        const uint64_t existing = low_bits(units_of(p, q));
        for (int b = 0; b < panels.blocks; ++b) {
          const int64_t at = q * width + b * kUnits;
          const auto [x, h] = normalised_products(job, q, b, token + i);
          const U da = U::load(grads(q, i) + b * kUnits);
          const U dx = normalise_backward(
              da * U::load(w.norm_ih + at), x, own.statistics[0][token + i].rstd, own.means[i][0],
              own.means[i][1]);
          const U dh = choose(
              existing,
              normalise_backward(
                  da * U::load(w.norm_hh + at), h, own.statistics[1][token + i].rstd,
                  own.means[i][2], own.means[i][3]),
              U(T(0)));
          dx.store(all_steps(sequence.dax, group, q, i, s) + b * kUnits);
          dh.store(all_steps(sequence.da, group, q, i, s) + b * kUnits);
          dh.store(job.da + i * da_ld() + at);
        }
      }
  }

  struct Products {
    U x, h;
  };
  // Returns both products of block b, normalised.
  Products normalised_products(const Job& job, int64_t q, int b, int64_t token) const {
    const int64_t at = (q * chunk_tokens + token) * panels.width() + b * kUnits;
    return {
        own.statistics[0][token].normalise(U::load(job.products + at)),
        own.statistics[1][token].normalise(U::load(job.hidden_products + at))};
  }

  // After the first step --------------------------------------------------------------------------

  static int64_t groups(int64_t columns) {
    return (columns + kGroupTiles * kTile - 1) / (kGroupTiles * kTile);
  }
  int64_t weight_tasks() const {
    return panels.count * (groups(p.I) + groups(p.R)) + (projected ? tiles(p.R) * groups(p.H) : 0) +
        1;
  }
  int64_t input_groups() const { return (tiles(p.I) + kInputTiles - 1) / kInputTiles; }
  int64_t input_tasks() const {
    return p.grad_input ? (tokens + kInputTokens - 1) / kInputTokens * input_groups() : 0;
  }

  int64_t tasks() const { return input_tasks() + p.directions * weight_tasks(); }

  // Runs one task. The largest tasks come first.
  void run_task(int64_t task) {
    if (task < input_tasks())
      return input_gradient(task / input_groups(), task % input_groups() * kInputTiles * kTile);
    task -= input_tasks();
    const int64_t d = task / weight_tasks();
    task %= weight_tasks();
    const LstmDirection& direction = p.direction[d];
    const Sequence& sequence = sequences[d];
    for (const bool hidden : {false, true}) {
      const int64_t width = hidden ? p.R : p.I, count = panels.count * groups(width);
      if (task < count) {
        const int64_t q = task / groups(width);
        if (!hidden && task % groups(width) == 0) store_panel_vectors(d, q);
        S* grad = static_cast<S*>(hidden ? direction.grad_weight_hh : direction.grad_weight_ih);
        if (!grad) return;
        const int first = hidden ? panels.hh_first : panels.ih_first;
        const int* gate = (hidden ? panels.hh_gate : panels.ih_gate) + first;
        const S* da = (hidden ? sequence.da : sequence.dax) + q * tokens * panels.width();
        const double factor =
            hidden && p.recurrent_dropout.threshold ? p.recurrent_dropout.scale : 1;
        weight_gradient(
            da + first * kUnits, panels.width(), hidden ? panels.hh_width() : panels.ih_width(),
            hidden ? sequence.h : sequence.x, task % groups(width), width, factor,
            [&](int64_t m) -> S* {
              const int64_t unit = q * kUnits + m % kUnits;
              return unit < p.H ? grad + (gate[m / kUnits] * p.H + unit) * width : nullptr;
            });
        return;
      }
      task -= count;
    }
    if (projected && task < tiles(p.R) * groups(p.H)) {
      S* grad = static_cast<S*>(direction.grad_weight_hr);
      if (!grad) return;
      const int64_t tile = task / groups(p.H);
      weight_gradient(
          sequence.dq + tile * tokens * kTile, kTile, std::min(kTile, p.R - tile * kTile),
          sequence.m, task % groups(p.H), p.H, 1,
          [&](int64_t m) { return grad + (tile * kTile + m) * p.H; });
      return;
    }
    store_unit_vectors(d);
  }

  // Computes a^T b over all tokens for `rows` columns of a (tokens, a_ld) and one group of b's
  // 64-column panels, which hold E, or still S. Row m is written to row_of(m), unless that is null.
  template <class Right, class RowOf>
  void weight_gradient(
      const S* a, int64_t a_ld, int64_t rows, const Right* b, int64_t group, int64_t width,
      double factor, const RowOf& row_of) {
    const E* a_rows;
    if constexpr (kPack<E> == 2) {
      copy_right_rows<E>(Rows<S>{a, a_ld, 1}, tokens, rows, kTile, own.packed_a);
      a_rows = own.packed_a;
      a_ld = kTile;
    } else {
      a_rows = a;
    }
    const int64_t begin = group * kGroupTiles * kTile;
    const int64_t columns = std::min(kGroupTiles * kTile, width - begin);
    // The whole gradient would not stay in a cache.
    const bool stream = far_away<S>(panels.count * panels.width() * width);
    // With few tokens writing the result takes the time; whole rows are faster to write than tiles.
    const bool few = elements<E>(tokens) <= kTile;
    const int64_t high = few ? kFlatRows : kTile, wide = few ? kGroupTiles * kTile : kTile;
    // Up to this depth one product is exact enough; the products of deeper sums add up in double.
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
                Rows<S>{b + (begin + c) * tokens, kTile, 1}, tokens, kTile, kTile, own.packed_b);
            b_panel = own.packed_b;
          }
          for (int64_t k = 0; k < depth; k += kTogether) {
            product<E>(
                count, kTile, std::min(kTogether, depth - k), a_rows + m + k * a_ld, 1, a_ld,
                b_panel + k * kTile, kTile, sums + (c - first), wide, false);
            if (depth <= kTogether) break;
            if (k == 0) std::fill_n(totals, count * kTile, 0.0);
            end_run(sums, totals, count * kTile);
          }
          if (depth > kTogether) std::copy_n(totals, count * kTile, sums);
        }
        if (tokens == 0) std::fill_n(sums, count * wide, T(0));
        if (factor != 1) this->scale(sums, count * wide, static_cast<T>(factor));
        for (int64_t k = 0; k < count; ++k)
          if (S* row = row_of(m + k))
            for (int64_t c = first; c < last; c += kTile) {
              const auto strip = Strip<T>::load(sums + k * wide + (c - first));
              if (last - c >= kTile) strip.store(row + begin + c, Whole{}, stream);
              else strip.store(row + begin + c, last - c);
            }
      }
    if (stream) fence_streams();
  }

  // Computes the input's gradient for a block of tokens, in the order of a direction that is not
  // reversed, and for columns from `begin` on.
  void input_gradient(int64_t block, int64_t begin) {
    const int64_t first = block * kInputTokens, rows = std::min(kInputTokens, tokens - first);
    const int64_t columns = std::min(kInputTiles * kTile, p.I - begin);
    const int64_t ld = 2 * panels.ih_width();
    struct Token {
      int64_t t, rank;
    } list[kInputTokens];
    int64_t s = std::upper_bound(p.start, p.start + p.steps, first) - p.start - 1;
    for (int64_t k = 0; k < rows; ++k) {
      if (first + k == p.start[s + 1]) ++s;
      list[k] = {s, first + k - p.start[s]};
    }
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      for (int64_t q = 0; q < panels.count; q += 2) {
        const int64_t pair = std::min<int64_t>(panels.count - q, 2);
        S* a = reinterpret_cast<S*>(own.packed_a);
        for (int64_t k = 0; k < rows; ++k) {
          const auto [t, rank] = list[k];
          const int64_t token = p.start[direction.reverse ? p.length[rank] - 1 - t : t] + rank;
          for (int64_t j = 0; j < pair; ++j)
            std::copy_n(
                sequences[d].dax + ((q + j) * tokens + token) * panels.width() +
                    panels.ih_first * kUnits,
                panels.ih_width(), a + k * ld + j * panels.ih_width());
        }
        for (int64_t c = 0; c < columns; c += kTile) {
          E* target = own.packed_b;
          for (int64_t j = 0; j < pair; ++j)
            for (int b = panels.ih_first; b < panels.ih_first + panels.ih_blocks; ++b) {
              const S* weight = static_cast<const S*>(direction.weight_ih) +
                  (panels.ih_gate[b] * p.H + (q + j) * kUnits) * p.I;
              pack_unit_rows<E>(
                  weight, p.I, units_of(p, q + j), begin + c, std::min(kTile, columns - c), target);
              target += elements<E>(kUnits) * kTile;
            }
          product<E>(
              rows, kTile, elements<E>(pair * panels.ih_width()), as_elements(a), elements_ld(ld),
              1, own.packed_b, kTile, own.sums + c * kInputTokens, kTile, d > 0 || q > 0);
        }
      }
    }
    for (int64_t k = 0; k < rows; ++k) {
      S* row = static_cast<S*>(p.grad_input) + (list[k].t * p.B + p.order[list[k].rank]) * p.I;
      for (int64_t c = 0; c < columns; c += kTile)
        narrow(
            own.sums + c * kInputTokens + k * kTile, std::min(kTile, columns - c), row + begin + c,
            1);
    }
  }

  // Writes a panel's gradients of the biases and of the products' norms.
  void store_panel_vectors(int64_t d, int64_t q) {
    const LstmDirection& direction = p.direction[d];
    const Sequence& sequence = sequences[d];
    const int64_t width = panels.width(), size = panels.count * width;
    const auto store_sums = [&](const TokenSums& sums, int64_t first, const int* gate,
                                void* target) {
      if (!target) return;
      for (int b = 0; b < panels.blocks; ++b)
        if (gate[b] >= 0)
          sums.store(
              first + b * kUnits, units_of(p, q),
              static_cast<T*>(target) + gate[b] * p.H + q * kUnits);
    };
    if (norm) {
      store_sums(sequence.bias, q * width, panels.ih_gate, direction.grad_bias);
      store_sums(sequence.bias, q * width, panels.hh_gate, direction.grad_bias_hh);
      store_sums(sequence.bias, size + q * width, panels.ih_gate, direction.grad_norm_ih);
      store_sums(sequence.bias, 2 * size + q * width, panels.ih_gate, direction.grad_norm_hh);
    } else if (direction.grad_bias || direction.grad_bias_hh) {
      T run[4 * kUnits] = {};
      double total[4 * kUnits] = {};
      TokenSums sums;
      sums.run = run;
      sums.total = total;
      sum_tokens(sequence.da + q * tokens * width, sums);
      store_sums(sums, 0, panels.ih_gate, direction.grad_bias);
      store_sums(sums, 0, panels.hh_gate, direction.grad_bias_hh);
    }
  }

  // Writes the gradients of the peepholes and of the cell's norm.
  void store_unit_vectors(int64_t d) {
    const LstmDirection& direction = p.direction[d];
    const Sequence& sequence = sequences[d];
    const auto vector = [&](const TokenSums& sums, int from, void* to, int64_t row) {
      if (to) sums.store(from * m_ld(), p.H, static_cast<T*>(to) + row * p.H);
    };
    if (direction.grad_peephole) {
      vector(sequence.peephole, 0, direction.grad_peephole, 0);
      if (!p.coupled) vector(sequence.peephole, 1, direction.grad_peephole, 1);
      vector(sequence.peephole, 2, direction.grad_peephole, p.coupled ? 1 : 2);
    }
    if (norm) {
      vector(sequence.cell, 0, direction.grad_norm_cell_weight, 0);
      vector(sequence.cell, 1, direction.grad_norm_cell_bias, 0);
    }
  }

  // Sums a panel's gradients over all tokens.
  void sum_tokens(const S* grads, const TokenSums& sums) const {
    for (int64_t token = 0; token < tokens; token += kRun) {
      U run[4] = {U(T(0)), U(T(0)), U(T(0)), U(T(0))};
      for (int64_t k = token; k < std::min(token + kRun, tokens); ++k)
        for (int b = 0; b < panels.blocks; ++b)
          run[b] = run[b] + U::load(grads + k * panels.width() + b * kUnits);
      for (int b = 0; b < panels.blocks; ++b) run[b].store(sums.run + b * kUnits);
      sums.end_run(0, panels.width());
    }
  }

  const bool recomputes_gates;     // the gates were not saved, or only their products
  const bool recomputes_products;  // of W_ih and W_hh
  const int64_t tokens;
  const bool once;             // all products are recomputed at once
  const int64_t chunk_tokens;  // tokens that are recomputed at once, at most
  Sequence sequences[LstmProblem::kMaxDirections];
  Job jobs[LstmProblem::kMaxDirections * LstmProblem::kMaxGroups];
  Own own;
};

int64_t workspace(const LstmProblem& p, int64_t threads) {
  return for_element(p, [&]<class E>() { return Backward<E>(p, nullptr, threads, 0).bytes; });
}

void run(const LstmProblem& p, void* memory, int64_t threads, const Crew& crew, int64_t index) {
  [[maybe_unused]] const MatrixUnit unit;
  for_element(p, [&]<class E>() { Backward<E>(p, memory, threads, index).run(crew, index); });
}

}  // namespace

LstmBackward lstm_backward() { return {workspace, run}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
