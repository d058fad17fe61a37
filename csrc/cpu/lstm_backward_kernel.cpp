// LSTM, GRU and RNN backward on a CPU.
//
// As in the forward, teams of threads go through the steps of a direction, or of a group of its
// rows, here from the last step to the first. At each step a thread first owns columns of dh: it
// multiplies the gate gradients of the following step, of all units, by its panels of W_hh^T. After
// a barrier it owns hidden units: it computes the gradients of their gates from dh, or with a
// projection from dm = dq W_hr. After another barrier the next iteration begins. The gate gradients
// of all steps are kept, panel by panel. lstm_weight_gradients.h computes the gradients of the
// weights and the input from them. In a GRU whose reset gate precedes the product, the gradients of
// n are computed from dh before the first barrier, and those of r h, r and z before the second.
//
// Gates that the forward did not save are recomputed for about 128 tokens at a time, or for all
// tokens if they are few. The products and their order are those of the forward, so the bits are
// the same. With layer normalisation they are recomputed from the saved products, if there are any.
//
// Each element is a fixed chain of multiply-adds for any number of threads. Sums over tokens are
// cut at fixed numbers of tokens.
//
// Floor of the steps: 2 · G·H · R (+ 2 · R · H) operations per token on the multiply-add pipes, or
// with few rows the bytes of W_hh at each step.

#include "cpu/kernels.h"
#include "cpu/lstm_weight_gradients.h"
#include "cpu/row.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class E>
class Backward {
  using S = typename Layer<E>::S;
  using T = typename Layer<E>::T;
  using U = typename Layer<E>::U;
  using LstmGates = typename Layer<E>::LstmGates;
  using Weights = typename Layer<E>::Weights;

 public:
  Backward(const LstmProblem& p, void* workspace, int64_t threads, int64_t index)
      : layer(p), p(p), panels(layer.panels), gradients(layer, threads), tokens(gradients.tokens),
        recomputes_gates(p.cell == Cell::Lstm && (layer.norm || !p.direction[0].gates)),
        is_plain(
            p.cell == Cell::Lstm && !recomputes_gates && !layer.projected && !p.coupled &&
            !p.direction[0].weight_peephole && std::isinf(p.cell_clip) && p.zoneout_c == 0 &&
            p.H % kUnits == 0),
        recomputes_products(p.cell == Cell::Lstm && !p.direction[0].gates),
        once(recomputes_products && p.groups == 1 && p.steps <= layer.chunk),
        chunk_tokens(once ? tokens : layer.chunk * layer.group_rows()) {
    Arena arena(workspace);
    const int64_t rows = layer.group_rows(), width = panels.width();
    // Weights that are read once are packed while they are read.
    const bool keep_weights = recomputes_products && !once;
    layer.take_weights(arena, keep_weights, keep_weights, false);
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      RecurrentWeights& w = weights[d];
      // With one step W_hh is needed only for the gradient of h0, or of r h.
      w.hh = arena.take<E>(
          p.steps > 1 || direction.grad_h0 || panels.resets_first ? tiles(p.R) * hh_size() : 0);
      w.hr = arena.take<E>(layer.projected ? tiles(p.H) * hr_size() : 0);
    }
    gradients.take(arena);
    for (int64_t j = 0; j < p.directions * p.groups; ++j) {
      Job& job = jobs[j];
      job.da = arena.take<S>(left_rows_of<E>(rows) * da_ld());
      job.dh = arena.take<T>(rows * layer.h_ld());
      job.kept_dh =
          arena.take<T>(p.cell == Cell::Gru || p.zoneout_h != 0 ? rows * layer.h_ld() : 0);
      job.multiplier = arena.take<T>(p.recurrent_dropout.threshold ? rows * layer.h_ld() : 0);
      job.dq = arena.take<S>(layer.projected ? left_rows_of<E>(rows) * layer.h_ld() : 0);
      job.dc = arena.take<T>(panels.count * rows * kUnits);
      const int64_t recomputed = recomputes_products ? left_rows_of<E>(chunk_tokens) : 0;
      job.x = arena.take<S>(recomputed * layer.x_ld());
      job.h = arena.take<S>(recomputed * layer.h_ld());
      const bool apart = recomputes_gates && !products_in_da();
      job.products = arena.take<T>(apart ? panels.count * chunk_tokens * width : 0);
      if constexpr (std::is_same_v<S, T>)
        if (products_in_da()) job.products = gradients.directions[j].da;
      job.hidden_products = arena.take<T>(layer.norm ? panels.count * chunk_tokens * width : 0);
      job.gates = arena.take<T>(layer.norm ? panels.count * chunk_tokens * width : 0);
      job.cells = arena.take<T>(layer.norm ? panels.count * chunk_tokens * kUnits : 0);
      for (auto& moments : job.moments)
        moments = arena.take<T[2]>(layer.norm ? panels.count * chunk_tokens : 0);
      job.sums = arena.take<T[4]>(layer.norm ? panels.count * rows : 0);
      job.grads = arena.take<T>(layer.norm ? panels.count * rows * width : 0);
    }
    for (int64_t t = 0; t < threads; ++t) {
      Own piece;
      piece.row_buffer = arena.take<E>(layer.row_buffer_size());
      piece.panel = arena.take<E>(once ? layer.panel_size() : 0);
      piece.dm = arena.take<T>(layer.projected || panels.resets_first ? rows * kTile : 0);
      piece.words = arena.take<uint64_t>(rows);
      for (auto& statistics : piece.statistics)
        statistics = arena.take<Statistics<T>>(layer.norm ? chunk_tokens : 0);
      piece.means = arena.take<T[4]>(layer.norm ? rows : 0);
      piece.task = gradients.take_memory(arena);
      if (t == index) own = piece;
    }
    bytes = arena.used();
    layer.row_buffer = own.row_buffer;
    layer.panel = own.panel;
    gradients.memory = own.task;
  }

  void run(const Crew& crew, int64_t index) {
    const Team all = crew.all(index);
    if (recomputes_gates || p.direction[0].weight_peephole) layer.pack(all);
    pack_recurrent_weights(all);
    gradients.begin(all);
    all.wait();
    crew.share_jobs(index, p.directions * p.groups, [&](int64_t job, const Team& team) {
      run_job({p, job / p.groups, job % p.groups, p.groups}, jobs[job], team);
    });
    if (gradients.streams) fence_streams();
    all.wait();
    crew.share_tasks(index, gradients.tasks(), [&](int64_t task) { gradients.run_task(task); });
  }

  int64_t bytes;  // of the workspace

 private:
  struct Job {
    S* da;          // [rows][da_ld]: a step's gate gradients in the order of place()
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

  // One direction's weights as B of the products of a backward step.
  struct RecurrentWeights {
    E* hh;  // [tiles of R][k][64]: rows of W_hh in the order of job.da's columns
    E* hr;  // [tiles of H][k][64]: rows of W_hr
  };

  // One thread's memory.
  struct Own {
    E *row_buffer, *panel;
    T* dm;                         // [rows][64]: gradient of m, or of r h
    uint64_t* words;               // [rows]: bits of 64 columns
    Statistics<T>* statistics[3];  // [tokens], in the order of Job::moments
    T (*means)[4];                 // [rows]
    typename WeightGradients<E>::Memory task;
  };

  // Returns whether recomputed products are stored in da, where the gate gradients overwrite them.
  bool products_in_da() const { return std::is_same_v<S, T> && once && !layer.norm; }
  int64_t depth() const { return panels.count * panels.hh_width(); }
  // Returns the first place in job.da of panel q's gradients of these blocks. Blocks that are
  // multiplied together come first, panel by panel, then the others.
  int64_t place(const Panels::Blocks& blocks, int64_t q) const {
    return panels.count * (blocks.first - panels.hh_first) * kUnits + q * blocks.width();
  }
  // Computes columns of the product of job.da's gradients of these blocks with W_hh.
  void multiply_hidden(
      const RowGroup& group, const Job& job, int64_t rows, const Panels::Blocks& blocks,
      int64_t tile, int64_t first, int64_t columns, T* target, int64_t ld) const {
    const int64_t begin = elements<E>(place(blocks, 0));
    product_with_packed<E>(
        rows, columns, elements<E>(panels.count * blocks.width()), as_elements<E>(job.da) + begin,
        elements_ld<E>(da_ld()), weights[group.index].hh + tile * hh_size() + begin * kTile, kTile,
        first, target, ld, false, exceeds_cache<E>(tiles(p.R) * hh_size()));
  }
  int64_t hh_size() const { return packed_rows<E>(elements<E>(depth())) * kTile; }
  int64_t hr_size() const { return packed_rows<E>(elements<E>(p.R)) * kTile; }
  // Padded, because rows whose distance is a multiple of a cache way's size would evict one
  // another. The padding is 0.
  int64_t da_ld() const { return depth() + 2 * kUnits; }

  // Before the first step -------------------------------------------------------------------------

  void pack_recurrent_weights(const Team& team) {
    for (int64_t d = 0; d < p.directions; ++d) {
      const LstmDirection& direction = p.direction[d];
      const RecurrentWeights& w = weights[d];
      Range share = team.share(w.hh ? tiles(p.R) : 0);
      for (int64_t tile = share.first; tile < share.last; ++tile)
        pack_hidden(direction, tile, w.hh + tile * hh_size());
      share = team.share(w.hr ? tiles(p.H) : 0);
      for (int64_t tile = share.first; tile < share.last; ++tile) {
        E* target = w.hr + tile * hr_size();
        pack_rows<E>(
            Rows<S>{static_cast<const S*>(direction.weight_hr) + tile * kTile, p.H, 1}, p.R,
            std::min(kTile, p.H - tile * kTile), 0, target);
        clear_rows<E>(elements<E>(p.R), packed_rows<E>(elements<E>(p.R)), target);
      }
    }
  }

  void pack_hidden(const LstmDirection& direction, int64_t tile, E* target) {
    const int64_t columns = std::min(kTile, p.R - tile * kTile);
    int64_t k = 0;
    for (const auto& blocks : {panels.with_h(), panels.with_reset_h()})
      for (int64_t q = 0; q < panels.count; ++q)
        for (int b = blocks.first; b < blocks.first + blocks.count; ++b) {
          const S* rows = static_cast<const S*>(direction.weight_hh) +
              (panels.hh_gate[b] * p.H + q * kUnits) * p.R;
          const int64_t units = units_of(p, q);
          pack_rows<E>(Rows<S>{rows + tile * kTile, p.R, 1}, units, columns, k, target);
          clear_rows<E>(k + elements<E>(units), k + elements<E>(kUnits), target);
          k += elements<E>(kUnits);
        }
    clear_rows<E>(k, packed_rows<E>(k), target);
  }

  // The sequence ----------------------------------------------------------------------------------

  void run_job(const RowGroup& group, const Job& job, const Team& team) {
    begin_job(group, job, team);
    team.wait();
    for (int64_t s1 = p.steps; s1 > 0;) {
      const int64_t s0 = std::max<int64_t>(s1 - layer.chunk, 0);
      if (recomputes_gates) recompute(group, job, team, s0, s1);
      for (int64_t s = s1 - 1; s >= s0; --s) {
        hidden_gradients(group, job, team, s);
        if (panels.resets_first) {
          candidate_gradients(group, job, team, s);
          team.wait();
          reset_gradients(group, job, team, s);
        } else {
          team.wait();
          gate_gradients(group, job, team, s, s0);
        }
        team.wait();
      }
      s1 = s0;
    }
    if (group.d.grad_h0) hidden_gradients(group, job, team, -1);
    if (group.d.grad_c0) {
      const Range rows = team.share(group.rows());
      for (int64_t i = rows.first; i < rows.last; ++i)
        layer.load_units(job.dc, i, static_cast<T*>(group.d.grad_c0) + group.row(i) * p.H);
    }
  }

  void begin_job(const RowGroup& group, const Job& job, const Team& team) {
    const Range own_rows = team.share(group.rows());
    for (int64_t i = own_rows.first; i < own_rows.last; ++i) {
      const T* dc = static_cast<const T*>(group.d.grad_c_n);
      layer.store_units(dc ? dc + group.row(i) * p.H : nullptr, i, job.dc);
      std::fill_n(job.da + i * da_ld() + depth(), da_ld() - depth(), S(0));
      if (job.dq) std::fill_n(job.dq + i * layer.h_ld(), layer.h_ld(), S(0));
      if (job.multiplier)
        for (int64_t c = 0; c < p.R; c += kTile) {
          const uint64_t kept =
              group.kept(p.recurrent_dropout, RowGroup::RecurrentDropout, i, 0, c);
          for (int64_t k = 0; k < kTile; ++k)
            job.multiplier[i * layer.h_ld() + c + k] =
                kept >> k & 1 ? static_cast<T>(p.recurrent_dropout.scale) : T(0);
        }
    }
  }

  // Computes this thread's columns of the gradient of h after step s, and splits it between h~ and
  // the previous h. Step -1 denotes h0.
  void hidden_gradients(const RowGroup& group, const Job& job, const Team& team, int64_t s) {
    const int64_t later = group.active(s + 1), rows = s < 0 ? group.rows() : group.active(s);
    for_tiles(
        team, p.R,
        [&](int64_t tile, int64_t first, int64_t columns) {
          if (later)
            multiply_hidden(
                group, job, later, panels.with_h(), tile, first, columns,
                job.dh + tile * kTile + first, layer.h_ld());
          for (int64_t i = 0; i < rows; ++i) {
            if (s >= 0 && p.draw_h.threshold)
              own.words[i] = group.kept(p.draw_h, RowGroup::ZoneoutH, i, s, tile * kTile);
            for (int64_t c = first; c < first + columns; c += kUnits) {
              const int64_t column = tile * kTile + c, count = std::min(kUnits, p.R - column);
              const int64_t at = i * layer.h_ld() + column;
              U dh(T(0));
              if (i < later) {
                dh = U::load(job.dh + at);
                if (job.multiplier) dh = dh * U::load(job.multiplier + at);
                if (job.kept_dh) dh = dh + U::load(job.kept_dh + at);
              } else if (group.d.grad_h_n) {
                const int64_t from = group.row(i) * p.R + column;
                dh = p.wide_states ? U::load(static_cast<const T*>(group.d.grad_h_n) + from, count)
                                   : U::load(static_cast<const S*>(group.d.grad_h_n) + from, count);
              }
              if (s < 0) {
                const int64_t to = group.row(i) * p.R + column;
                if (p.wide_states) dh.store(static_cast<T*>(group.d.grad_h0) + to, count);
                else dh.store(static_cast<S*>(group.d.grad_h0) + to, count);
                continue;
              }
              dh = dh + U::load(group.template output<S>(p.grad_output, i, s) + column, count);
              split_dh(group, job, i, s, column, dh);
            }
          }
        },
        /*descending=*/s % 2 == 1);
  }

  void split_dh(const RowGroup& group, const Job& job, int64_t i, int64_t s, int64_t column, U dh) {
    const int64_t at = i * layer.h_ld() + column;
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
    if (!layer.projected) {
      dh.store(job.dh + at);
      return;
    }
    if (std::isfinite(p.proj_clip))
      dh = choose(group.clipped(i, s)[p.cell_clip_words() + column / kUnits], U(T(0)), dh);
    // Past R a product is NaN if a factor is infinite, and the product with W_hr would read it.
    dh = choose(low_bits(std::min(kUnits, p.R - column)), dh, U(T(0)));
    dh.store(job.dq + at);
    S* dq = gradients.directions[group.index].dq;
    gradients.keep(dh, dq + (column / kTile * tokens + group.token(i, s)) * kTile + column % kTile);
  }

  // Returns how many tokens the steps [s0, s) have.
  static int64_t group_token(const RowGroup& group, int64_t s, int64_t s0) {
    int64_t token = 0;
    for (; s0 < s; ++s0) token += group.active(s0);
    return token;
  }

  // Returns the panels of `columns` columns of a tile, from column `first` on.
  static Range panels_in(int64_t tile, int64_t first, int64_t columns) {
    const int64_t begin = (tile * kTile + first) / kUnits;
    return {begin, begin + columns / kUnits};
  }

  // Computes the gate gradients of this thread's units at step s.
  void gate_gradients(
      const RowGroup& group, const Job& job, const Team& team, int64_t s, int64_t s0) {
    if (layer.norm) return normalised_gate_gradients(group, job, team, s, s0);
    const int64_t token = group_token(group, s, s0), rows = group.active(s);
    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      begin_tile(group, job, s, tile, first, columns);
      const Range within = panels_in(tile, first, columns);
      for (int64_t q = within.first; q < within.last; ++q)
        for (int64_t i = 0; i < rows; ++i) {
          fetch_ahead(group, job, q, i, s, rows);
          if (p.cell == Cell::Gru) gru_gradients(group, job, q, i, s);
          else if (p.cell == Cell::Rnn) rnn_gradients(group, job, q, i, s);
          else if (is_plain) lstm_gradients<true>(group, job, q, i, s, token + i);
          else lstm_gradients<false>(group, job, q, i, s, token + i);
        }
    });
  }

  // Computes the gate gradients of row i's units of panel q in an LSTM without layer normalisation.
  // `plain` leaves out the code of all options, which is most of it (see is_plain).
  template <bool plain>
  TRIFUSE_INLINE void lstm_gradients(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, int64_t token) {
    const Gates g = gates_of<plain>(group, job, q, i, s, token);
    const U dm = plain ? U::load(job.dh + i * layer.h_ld() + q * kUnits) : load_dm(job, q, i);
    const U tanh_c = tanh(g.c);
    U da[4];
    const U dn = dm * g.o * (U(T(1)) - tanh_c * tanh_c);
    cell_backward<plain>(group, job, q, i, s, dm * tanh_c, dn, g, da);
    if (!plain) store_m(group, q, i, s, g.o * tanh_c);
    S* row = gradients.panel_row(gradients.directions[group.index].da, group, q, i, s);
    for (int b = 0; b < (plain ? 4 : panels.blocks); ++b) {
      da[b].store(job.da + i * da_ld() + q * panels.width() + b * kUnits);
      gradients.keep(da[b], row + b * kUnits);
    }
  }

  // Prefetches the inputs of a panel's units some rows after row i, or in the next panel, and the
  // memory of their gradients. Rows are too far apart for the hardware prefetcher, and the rows of
  // job.da are in the caches of all threads, which have just read them. The panel need not exist.
  void fetch_ahead(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, int64_t rows) const {
    constexpr int64_t kAhead = 8;
    if (rows <= kAhead) {
      ++q;
    } else if ((i += kAhead) >= rows) {
      i -= rows;
      ++q;
    }
    const int64_t token = group.position(i, s) * p.B + group.row(i);
    if (p.cell == Cell::Rnn) {
      __builtin_prefetch(group.template output<S>(p.output, i, s) + q * kUnits);
    } else if (!recomputes_gates) {
      const S* gates =
          static_cast<const S*>(group.d.gates) + (token * p.H + q * kUnits) * panels.blocks;
      prefetch_strip(gates);
    }
    if (p.cell == Cell::Lstm && s > 0)
      __builtin_prefetch(group.template cells<T>(i, s - 1) + q * kUnits);
    // reset_gradients() reads a part of the row, so these GRUs do not stream it.
    if (!gradients.streams || panels.resets_first)
      prefetch_strip</*write=*/true>(
          gradients.panel_row(gradients.directions[group.index].da, group, q, i, s));
    if (p.cell != Cell::Gru)
      prefetch_strip</*write=*/true>(job.da + i * da_ld() + q * panels.width());
  }

  // Computes the gradients of m from those of W_hr's product, and draws zoneout's bits.
  void begin_tile(
      const RowGroup& group, const Job& job, int64_t s, int64_t tile, int64_t first,
      int64_t columns) {
    const int64_t rows = group.active(s);
    if (layer.projected)
      product_with_packed<E>(
          rows, columns, elements<E>(p.R), as_elements<E>(job.dq), elements_ld<E>(layer.h_ld()),
          weights[group.index].hr + tile * hr_size(), kTile, first, own.dm + first, kTile, false,
          exceeds_cache<E>(tiles(p.H) * hr_size()));
    if (p.draw_c.threshold)
      for (int64_t i = 0; i < rows; ++i)
        own.words[i] = group.kept(p.draw_c, RowGroup::ZoneoutC, i, s, tile * kTile);
  }

  U load_dm(const Job& job, int64_t q, int64_t i) const {
    return layer.projected ? U::load(own.dm + i * kTile + q * kUnits % kTile)
                           : U::load(job.dh + i * layer.h_ld() + q * kUnits);
  }

  // Keeps m, or r h, for the gradient of the weight that multiplies it.
  void store_m(const RowGroup& group, int64_t q, int64_t i, int64_t s, const U& m) const {
    S* panels_of_m = gradients.directions[group.index].m;
    if (!panels_of_m) return;
    S* panel = panels_of_m + q / 4 * tokens * kTile;
    gradients.keep(m, panel + group.token(i, s) * kTile + q % 4 * kUnits);
  }

  // The forward's gates, and the previous cell.
  struct Gates : LstmGates {
    U c_old;
  };

  U cell_before(const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    const T* c = group.template c<T>(i, s - 1);
    return c ? U::load(c + q * kUnits, units_of(p, q)) : U(T(0));
  }

  template <bool plain>
  TRIFUSE_INLINE Gates gates_of(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, int64_t token) const {
    Gates g;
    if constexpr (plain) {
      const S* row = static_cast<const S*>(group.d.gates) +
          ((group.position(i, s) * p.B + group.row(i)) * p.H + q * kUnits) * 4;
      for (U* gate : {&g.i, &g.f, &g.g, &g.o}) {
        *gate = U::load(row);
        row += kUnits;
      }
      const T* c_old = group.template c<T>(i, s - 1);
      g.c_old = c_old ? U::load(c_old + q * kUnits) : U(T(0));
      g.c = U::load(group.template cells<T>(i, s) + q * kUnits);
      return g;
    }
    const int64_t count = units_of(p, q);
    g.c_old = cell_before(group, q, i, s);
    const int64_t at = (q * chunk_tokens + token) * panels.width();
    if (layer.norm) {
      const T* row = job.gates + at;
      g.i = U::load(row);
      g.f = p.coupled ? U(T(1)) - g.i : U::load(row + kUnits);
      g.g = U::load(row + (panels.blocks - 2) * kUnits);
      g.o = U::load(row + (panels.blocks - 1) * kUnits);
    } else if (recomputes_gates) {
      U a[4];
      for (int b = 0; b < panels.blocks; ++b) a[b] = U::load(job.products + at + b * kUnits);
      static_cast<LstmGates&>(g) = layer.activate(group, q, a, g.c_old);
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
  template <bool plain>
  TRIFUSE_INLINE void cell_backward(
      const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s, const U& grad_o,
      const U& grad_c, const Gates& g, U da[4]) {
    const U one(T(1));
    const bool has_peephole = !plain && group.d.weight_peephole, coupled = !plain && p.coupled;
    const T* peephole = layer.weights[group.index].peephole + q * kUnits;
    T* carried = job.dc + layer.unit_row(q, i);
    U dc = U::load(carried), dc_old(T(0));  // gradient of the previous cell
    if (!plain && p.draw_c.threshold) {
      const uint64_t kept = own.words[i] >> q % 4 * kUnits;
      dc_old = choose(kept, U(T(0)), dc);
      dc = choose(kept, dc, U(T(0)));
    } else if (!plain && p.zoneout_c != 0 && !p.training) {
      dc_old = U(T(p.zoneout_c)) * dc;
      dc = U(T(1 - p.zoneout_c)) * dc;
    }
    const U da_o = grad_o * g.o * (one - g.o);
    U du = dc + rounded_product(grad_c);
    if (has_peephole) du = multiply_add(da_o, U::load(peephole + 2 * layer.m_ld()), du);
    if (!plain && std::isfinite(p.cell_clip)) du = choose(g.clipped, U(T(0)), du);
    const U da_i = du * (coupled ? g.g - g.c_old : g.g) * g.i * (one - g.i);
    const U da_f = du * g.c_old * g.f * (one - g.f);
    dc_old = multiply_add(du, g.f, dc_old);
    if (has_peephole) {
      const TokenSums<T>& peephole_sums = gradients.directions[group.index].peephole;
      T* sums = peephole_sums.run + q * kUnits;
      const auto add = [&](int gate, const U& da, const U& c) {
        multiply_add(da, c, U::load(sums + gate * layer.m_ld())).store(sums + gate * layer.m_ld());
      };
      dc_old = multiply_add(da_i, U::load(peephole), dc_old);
      add(0, da_i, g.c_old);
      if (!coupled) {
        dc_old = multiply_add(da_f, U::load(peephole + layer.m_ld()), dc_old);
        add(1, da_f, g.c_old);
      }
      add(2, da_o, g.c);
      if (ends_run(group.token(i, s)))
        for (int gate = 0; gate < 3; ++gate)
          peephole_sums.end_run(gate * layer.m_ld() + q * kUnits, kUnits);
    }
    dc_old.store(carried);
    da[0] = da_i;
    if (!coupled) da[1] = da_f;
    da[plain ? 2 : panels.blocks - 2] = du * g.i * (one - g.g * g.g);
    da[plain ? 3 : panels.blocks - 1] = da_o;
  }

  void gru_gradients(const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s) {
    const int64_t count = units_of(p, q), at = i * layer.h_ld() + q * kUnits;
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
      gradients.keep(
          da[b],
          gradients.panel_row(gradients.directions[group.index].da, group, q, i, s) + b * kUnits);
    }
  }

  // The gates and the old h of panel q and row i, in a GRU whose reset gate precedes the product.
  struct ResetGates {
    U r, z, n, old;
  };
  ResetGates reset_gates(const RowGroup& group, int64_t q, int64_t i, int64_t s) const {
    const int64_t count = units_of(p, q);
    const S* row = static_cast<const S*>(group.d.gates) +
        (group.position(i, s) * p.B + group.row(i)) * p.H * 3 + q * kUnits * 3;
    const S* h = group.template h<S>(i, s - 1);
    return {
        U::load(row, count), U::load(row + count, count), U::load(row + 2 * count, count),
        h ? U::load(h + q * kUnits, count) : U(T(0))};
  }

  // Computes the gradients of n and z of this thread's units from those of h.
  void candidate_gradients(const RowGroup& group, const Job& job, const Team& team, int64_t s) {
    const int64_t n_place = place(panels.with_reset_h(), 0), rows = group.active(s);
    const U one(T(1));
    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      const Range within = panels_in(tile, first, columns);
      for (int64_t q = within.first; q < within.last; ++q)
        for (int64_t i = 0; i < rows; ++i) {
          fetch_ahead(group, job, q, i, s, rows);
          const int64_t at = i * layer.h_ld() + q * kUnits;
          const auto [r, z, n, old] = reset_gates(group, q, i, s);
          const U dh = U::load(job.dh + at);
          // Past H a product is NaN if a factor is infinite, and W_hh's product would read it.
          const uint64_t existing = low_bits(units_of(p, q));
          const U dn = choose(existing, dh * (one - z) * (one - n * n), U(T(0)));
          const U dz = choose(existing, dh * (old - n) * z * (one - z), U(T(0)));
          (dh * z).store(job.kept_dh + at);
          dn.store(job.da + i * da_ld() + n_place + q * kUnits);
          S* row = gradients.panel_row(gradients.directions[group.index].da, group, q, i, s);
          dz.store(row + kUnits);
          dn.store(row + 2 * kUnits);
          store_m(group, q, i, s, r * old);
        }
    });
  }

  // Computes the gradients of r h from those of n of all units, and from them those of r.
  void reset_gradients(const RowGroup& group, const Job& job, const Team& team, int64_t s) {
    const int64_t rows = group.active(s);
    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      multiply_hidden(
          group, job, rows, panels.with_reset_h(), tile, first, columns, own.dm + first, kTile);
      const Range within = panels_in(tile, first, columns);
      for (int64_t q = within.first; q < within.last; ++q)
        for (int64_t i = 0; i < rows; ++i) {
          const ResetGates g = reset_gates(group, q, i, s);
          const U dv = U::load(own.dm + i * kTile + q * kUnits % kTile);
          const U dr =
              choose(low_bits(units_of(p, q)), dv * g.old * g.r * (U(T(1)) - g.r), U(T(0)));
          T* kept = job.kept_dh + i * layer.h_ld() + q * kUnits;
          multiply_add(dv, g.r, U::load(kept)).store(kept);
          S* row = gradients.panel_row(gradients.directions[group.index].da, group, q, i, s);
          S* da = job.da + i * da_ld() + place(panels.with_h(), q);
          dr.store(row);
          dr.store(da);
          U::load(row + kUnits).store(da + kUnits);
        }
    });
  }

  void rnn_gradients(const RowGroup& group, const Job& job, int64_t q, int64_t i, int64_t s) {
    const int64_t count = units_of(p, q);
    const U h = U::load(group.template output<S>(p.output, i, s) + q * kUnits, count);
    const U dh = U::load(job.dh + i * layer.h_ld() + q * kUnits);
    U da = p.relu ? relu_backward(dh, h) : dh * (U(T(1)) - h * h);
    // Past H a product is NaN if a factor is infinite, and W_hh's product would read it.
    da = choose(low_bits(count), da, U(T(0)));
    da.store(job.da + i * da_ld() + q * kUnits);
    gradients.keep(da, gradients.panel_row(gradients.directions[group.index].da, group, q, i, s));
  }

  // Computed again --------------------------------------------------------------------------------

  void recompute(const RowGroup& group, const Job& job, const Team& team, int64_t s0, int64_t s1) {
    const int64_t count = group_token(group, s1, s0), capacity = chunk_tokens;
    const int64_t width = panels.width();
    const Range own_panels = team.share(panels.count);
    if (layer.norm && !recomputes_products) {
      each_token(group, s0, s1, [&](int64_t i, int64_t s, int64_t token) {
        for (int64_t q = own_panels.first; q < own_panels.last; ++q) {
          const int64_t at = (q * capacity + token) * width, units = units_of(p, q);
          const T* kept = layer.kept_products(group, q, i, s);
          for (int b = 0; b < panels.blocks; ++b) {
            U::load(kept + b * units, units).store(job.products + at + b * kUnits);
            U::load(kept + (panels.blocks + b) * units, units)
                .store(job.hidden_products + at + b * kUnits);
          }
        }
      });
    }
    if (recomputes_products) {
      layer.gather(group, team, s0, s1, job.x);
      S* h = job.h;
      for (int64_t s = s0; s < s1; h += group.active(s++) * layer.h_ld()) {
        const Range rows = team.share(group.active(s));
        for (int64_t i = rows.first; i < rows.last; ++i) {
          std::fill_n(h + i * layer.h_ld(), layer.h_ld(), S(0));
          for (int64_t c = 0; c < p.R; c += kTile)
            layer.copy_hidden(group, i, s, c, std::min(kTile, p.R - c), h + i * layer.h_ld() + c);
        }
      }
      team.wait();
      for (int64_t q = own_panels.first; q < own_panels.last; ++q) {
        T* input_products = job.products + q * capacity * width;
        T* hidden_products =
            layer.norm ? job.hidden_products + q * capacity * width : input_products;
        layer.multiply_input(group.index, q, count, job.x, input_products);
        layer.multiply_hidden(
            group.index, q, count, job.h, panels.with_h(), hidden_products, !layer.norm);
      }
    }
    if (layer.norm) {
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
          layer.normalised_gates(
              group.index, q, job.products + at, own.statistics[0][token], job.hidden_products + at,
              own.statistics[1][token], a);
          const LstmGates g = layer.activate(group, q, a, cell_before(group, q, i, s));
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
    for (int64_t s = s0; s < s1; ++s) {
      const int64_t rows = group.active(s);
      for (int64_t i = 0; i < rows; ++i) f(i, s, token + i);
      token += rows;
    }
  }

  // Layer normalisation ---------------------------------------------------------------------------

  U normalised_cell(const RowGroup& group, int64_t q, int64_t token, const U& c) const {
    const T* norm_cell = layer.weights[group.index].norm_cell + q * kUnits;
    return multiply_add(
        own.statistics[2][token].normalise(c), U::load(norm_cell),
        U::load(norm_cell + layer.m_ld()));
  }

  // Adds up the panels' sums, panel by panel, to means over `size` values.
  void combine_sums(const Job& job, int64_t rows, int64_t size) {
    for (int64_t i = 0; i < rows; ++i)
      for (int k = 0; k < 4; ++k) {
        T sum = 0;
        for (int64_t q = 0; q < panels.count; ++q) sum += job.sums[q * layer.group_rows() + i][k];
        own.means[i][k] = sum / static_cast<T>(size);
      }
  }

  // Three passes: back through the cells' norm, through the gates, and through the products' norms.
  // Each pass needs sums over rows from the previous one.
  void normalised_gate_gradients(
      const RowGroup& group, const Job& job, const Team& team, int64_t s, int64_t s0) {
    const int64_t token = group_token(group, s, s0), rows = group.active(s);
    const Range share = team.share(panels.count);
    for_tiles(team, p.H, [&](int64_t tile, int64_t first, int64_t columns) {
      begin_tile(group, job, s, tile, first, columns);
      cell_norm_gradients(group, job, panels_in(tile, first, columns), s, token);
    });
    team.wait();
    combine_sums(job, rows, p.H);
    team.wait();  // before the products' sums overwrite these
    gate_gradients_of_normalised(group, job, share, s, token);
    team.wait();
    combine_sums(job, rows, panels.blocks * p.H);
    product_norm_gradients(group, job, share, s, token);
  }

  // The buffer of one panel and row. It holds in turn what each of two passes leaves for the next
  // one.
  T* panel_grads(const Job& job, int64_t q, int64_t i) const {
    return job.grads + (q * layer.group_rows() + i) * panels.width();
  }

  static void add_to(T* sums, const U& x) { (U::load(sums) + x).store(sums); }

  // From dm to the gradients of the cells before their norm; adds to those of the norm's weights.
  void cell_norm_gradients(
      const RowGroup& group, const Job& job, const Range& within, int64_t s, int64_t token) {
    const Weights& w = layer.weights[group.index];
    const auto& direction = gradients.directions[group.index];
    const int64_t rows = group.active(s);
    for (int64_t q = within.first; q < within.last; ++q)
      for (int64_t i = 0; i < rows; ++i) {
        const Gates g = gates_of<false>(group, job, q, i, s, token + i);
        const U tanh_c = tanh(normalised_cell(group, q, token + i, g.c));
        const U dm = load_dm(job, q, i), dn = dm * g.o * (U(T(1)) - tanh_c * tanh_c);
        const U n = own.statistics[2][token + i].normalise(g.c);
        store_m(group, q, i, s, g.o * tanh_c);
        add_to(direction.cell.run + q * kUnits, dn * n);
        add_to(direction.cell.run + layer.m_ld() + q * kUnits, dn);
        if (ends_run(group.token(i, s)))
          for (int k = 0; k < 2; ++k) direction.cell.end_run(k * layer.m_ld() + q * kUnits, kUnits);
        const U grad_n = dn * U::load(w.norm_cell + q * kUnits);
        (dm * tanh_c).store(panel_grads(job, q, i));
        grad_n.store(panel_grads(job, q, i) + kUnits);
        T* sums = job.sums[q * layer.group_rows() + i];
        sums[0] = grad_n.total();
        sums[1] = (grad_n * n).total();
      }
  }

  // From the cells' gradients to those of the gates; adds to those of the biases and of the
  // products' norms' weights.
  void gate_gradients_of_normalised(
      const RowGroup& group, const Job& job, const Range& share, int64_t s, int64_t token) {
    const int64_t rows = group.active(s), width = panels.width(), size = panels.count * width;
    const Weights& w = layer.weights[group.index];
    const auto& direction = gradients.directions[group.index];
    for (int64_t q = share.first; q < share.last; ++q) {
      if (p.draw_c.threshold)
        for (int64_t i = 0; i < rows; ++i)
          own.words[i] = group.kept(p.draw_c, RowGroup::ZoneoutC, i, s, q / 4 * kTile);
      for (int64_t i = 0; i < rows; ++i) {
        const Gates g = gates_of<false>(group, job, q, i, s, token + i);
        const Statistics<T>& cell = own.statistics[2][token + i];
        const U grad_c = normalise_backward(
            U::load(panel_grads(job, q, i) + kUnits), cell.normalise(g.c), cell.rstd,
            own.means[i][0], own.means[i][1]);
        U da[4];
        cell_backward<false>(group, job, q, i, s, U::load(panel_grads(job, q, i)), grad_c, g, da);
        U sums[4] = {U(T(0)), U(T(0)), U(T(0)), U(T(0))};
        for (int b = 0; b < panels.blocks; ++b) {
          const int64_t at = q * width + b * kUnits;
          const auto [x, h] = normalised_products(job, q, b, token + i);
          const U to_x = da[b] * U::load(w.norm_ih + at), to_h = da[b] * U::load(w.norm_hh + at);
          add_to(direction.bias.run + at, da[b]);
          add_to(direction.bias.run + size + at, da[b] * x);
          add_to(direction.bias.run + 2 * size + at, da[b] * h);
          sums[0] = sums[0] + to_x;
          sums[1] = multiply_add(to_x, x, sums[1]);
          sums[2] = sums[2] + to_h;
          sums[3] = multiply_add(to_h, h, sums[3]);
          da[b].store(panel_grads(job, q, i) + b * kUnits);
        }
        if (ends_run(group.token(i, s)))
          for (int k = 0; k < 3; ++k) direction.bias.end_run(k * size + q * width, width);
        for (int k = 0; k < 4; ++k) job.sums[q * layer.group_rows() + i][k] = sums[k].total();
      }
    }
  }

  // From the gates' gradients to those of both products before their norms.
  void product_norm_gradients(
      const RowGroup& group, const Job& job, const Range& share, int64_t s, int64_t token) {
    const Weights& w = layer.weights[group.index];
    const auto& direction = gradients.directions[group.index];
    const int64_t rows = group.active(s);
    for (int64_t q = share.first; q < share.last; ++q)
      for (int64_t i = 0; i < rows; ++i) {
        const uint64_t existing = low_bits(units_of(p, q));
        for (int b = 0; b < panels.blocks; ++b) {
          const int64_t at = q * panels.width() + b * kUnits;
          const auto [x, h] = normalised_products(job, q, b, token + i);
          const U da = U::load(panel_grads(job, q, i) + b * kUnits);
          const U dx = normalise_backward(
              da * U::load(w.norm_ih + at), x, own.statistics[0][token + i].rstd, own.means[i][0],
              own.means[i][1]);
          const U dh = choose(
              existing,
              normalise_backward(
                  da * U::load(w.norm_hh + at), h, own.statistics[1][token + i].rstd,
                  own.means[i][2], own.means[i][3]),
              U(T(0)));
          gradients.keep(dx, gradients.panel_row(direction.dax, group, q, i, s) + b * kUnits);
          gradients.keep(dh, gradients.panel_row(direction.da, group, q, i, s) + b * kUnits);
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

  Layer<E> layer;
  const LstmProblem& p;
  const Panels& panels;
  WeightGradients<E> gradients;
  const int64_t tokens;
  const bool recomputes_gates;  // the gates were not saved, or only their products
  // Whether lstm_gradients<true> serves the call: an LSTM of whole panels whose gates were saved,
  // without any option that these gradients depend on.
  const bool is_plain;
  const bool recomputes_products;  // of W_ih and W_hh
  const bool once;                 // whether all products are recomputed at once
  const int64_t chunk_tokens;      // tokens that are recomputed at once, at most
  RecurrentWeights weights[LstmProblem::kMaxDirections];
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
