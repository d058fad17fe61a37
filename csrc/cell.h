// The recurrent cells: they share the kernels' code, but for the arithmetic of a unit.

#pragma once

#include <cstdint>

namespace trifuse {

enum class Cell { Lstm, Gru, Rnn };

// Returns the number of gates, but for a coupled LSTM, which has 3.
constexpr int64_t gates_of(Cell cell) { return cell == Cell::Rnn ? 1 : cell == Cell::Gru ? 3 : 4; }

}  // namespace trifuse
