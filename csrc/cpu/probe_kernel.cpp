// Individual building blocks. Tests measure their accuracy, and benchmarks measure the ceiling with
// them.

#include <algorithm>
#include <chrono>

#include "cpu/kernels.h"
#include "cpu/operand.h"
#include "cpu/scratch.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class E>
double rate(double seconds) {
  using T = typename Element<E>::Accumulator;
  using Clock = std::chrono::steady_clock;
  constexpr int64_t K = kTile / kPack<E>;
  [[maybe_unused]] const MatrixUnit unit;
  Scratch scratch;
  scratch.reset(
      2 * Scratch::bytes<E>(kTile * K) + Scratch::bytes<T>(kTile * kTile), "a measurement");
  E *a = scratch.take<E>(kTile * K), *b = scratch.take<E>(K * kTile);
  T* c = scratch.take<T>(kTile * kTile);
  std::fill_n(a, kTile * K, E{});
  std::fill_n(b, K * kTile, E{});
  std::fill_n(c, kTile * kTile, T{});
  const auto start = Clock::now();
  std::chrono::duration<double> passed{0};
  int64_t products = 0;
  while (passed.count() < seconds) {
    for (int n = 0; n < 20; ++n) tile_gemm<E>(kTile, kTile, K, a, K, 1, b, kTile, c, kTile, {true});
    products += 20;
    passed = Clock::now() - start;
  }
  return 2.0 * kTile * kTile * kTile * static_cast<double>(products) / passed.count();
}

double matrix_rate(bool bfloat16, double seconds) {
  return bfloat16 ? rate<Compute<c10::BFloat16>::Element>(seconds) : rate<float>(seconds);
}

template <Vectorized<float> (*function)(Vectorized<float>)>
void each(const float* x, float* y, int64_t n) {
  using Vec = Vectorized<float>;
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    function(Vec::loadu(x + i, count)).store(y + i, static_cast<int>(count));
  }
}

}  // namespace

Probe probe() { return {matrix_rate, each<exp2<float>>, each<sigmoid<float>>, each<tanh<float>>}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
