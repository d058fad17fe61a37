// The recurrent cells. They share the kernels' code except for the arithmetic of a unit.

#pragma once

#include <cstdint>

namespace trifuse {

enum class Cell { Lstm, Gru, Rnn };

// Returns the number of gates; a coupled LSTM has only 3 of the 4.
constexpr int64_t gates_of(Cell cell) { return cell == Cell::Rnn ? 1 : cell == Cell::Gru ? 3 : 4; }

}  // namespace trifuse
