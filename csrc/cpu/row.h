// Rows of a matrix in strips of 64 columns, the number that one word of dropout bits covers.

#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kStrip = 64;

struct Whole {};
using Half = std::integral_constant<int64_t, kStrip / 2>;

// Calls f(c, count) for every strip of a row, beginning at column c. `count` is Whole, except for a
// shorter last strip. There it is a number, or Half, for which the compiler generates whole
// vectors.
template <class F>
TRIFUSE_INLINE inline void for_strips(int64_t N, const F& f) {
  int64_t c = 0;
  for (; c + kStrip <= N; c += kStrip) f(c, Whole{});
  if (N - c == Half::value) f(c, Half{});
  else if (c < N) f(c, N - c);
}

// Prefetches a strip, for writing with `write`. Addresses past a tensor's end do no harm.
template <bool write = false, class Scalar>
TRIFUSE_INLINE inline void prefetch_strip(const Scalar* from) {
  for (size_t byte = 0; byte < kStrip * sizeof(Scalar); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, write);
}

// Stores past the caches, to an address that is a multiple of the vector's size.
template <class Scalar>
TRIFUSE_INLINE inline void stream_vector(const Vectorized<Scalar>& v, Scalar* to) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i bits;
  std::memcpy(&bits, &v, sizeof bits);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i bits;
  std::memcpy(&bits, &v, sizeof bits);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
#else
  v.store(to);
#endif
}

// Copies 64-byte lines past the caches.
TRIFUSE_INLINE inline void stream_lines(const void* from, int64_t bytes, void* to) {
  using Vec = Vectorized<float>;
  for (int64_t byte = 0; byte < bytes; byte += sizeof(Vec))
    stream_vector(
        Vec::loadu(static_cast<const char*>(from) + byte),
        reinterpret_cast<float*>(static_cast<char*>(to) + byte));
}

inline void fence_streams() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// 64 neighbouring columns, in registers.
template <class T>
struct Strip : Lanes<Strip<T>, T, kStrip> {
  using Base = Lanes<Strip<T>, T, kStrip>;
  using typename Base::Vec;
  using Base::kVecs, Base::v;

  // Loads `count` columns, a number or Whole; the others are 0.
  template <class Scalar, class Count = Whole>
  static Strip load(const Scalar* from, Count count = {}) {
    if constexpr (std::is_same_v<Count, Whole>) return load_whole(from);
    else return load_part(from, count);
  }

  // With `stream` it stores past the caches, so that a line is not read before it is written.
  // fence_streams() must follow before another thread may read the result.
  template <class Scalar, class Count = Whole>
  void store(Scalar* to, Count count = {}, bool stream = false) const {
    stream = stream && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    if constexpr (std::is_same_v<Count, Whole>) {
      if (stream) return stream_whole(to);
      store_whole(to);
    } else {
      store_part(to, count, stream);
    }
  }

  // Returns the strip with 0 where a bit is not set.
  Strip keep(uint64_t bits) const { return choose(bits, *this, Base::full(T(0))); }

  // Returns the values rounded to a narrower type.
  template <class Scalar>
  Strip rounded() const {
    alignas(64) Scalar narrow[kStrip];
    store_whole(narrow);
    return load_whole(narrow);
  }

 private:
  template <class Scalar>
  static Strip load_whole(const Scalar* from) {
    Strip s;
    if constexpr (kReduced<Scalar>) {
      for (int i = 0; i < kVecs; i += 2)
        std::tie(s.v[i], s.v[i + 1]) =
            at::vec::convert_to_float<Scalar>(Vectorized<Scalar>::loadu(from + i * Vec::size()));
    } else {
      for (int i = 0; i < kVecs; ++i) s.v[i] = Vec::loadu(from + i * Vec::size());
    }
    return s;
  }

  // Vector by vector, so that only the last one is loaded partially.
  template <class Scalar>
  static Strip load_part(const Scalar* from, int64_t count) {
    Strip s = Base::full(T(0));
    for_vectors<Scalar>([&](int i, int64_t first, int64_t size) TRIFUSE_INLINE {
      if (first >= count) return;
      const auto part = Vectorized<Scalar>::loadu(from + first, std::min(count - first, size));
      if constexpr (kReduced<Scalar>)
        std::tie(s.v[i], s.v[i + 1]) = at::vec::convert_to_float<Scalar>(part);
      else s.v[i] = part;
    });
    return s;
  }

  template <class Scalar>
  void store_part(Scalar* to, int64_t count, bool stream) const {
    for_vectors<Scalar>([&](int i, int64_t first, int64_t size) TRIFUSE_INLINE {
      if (first >= count) return;
      Vectorized<Scalar> part;
      if constexpr (kReduced<Scalar>) part = rounded_to<Scalar>(v[i], v[i + 1]);
      else part = v[i];
      if (stream && first + size <= count) stream_vector(part, to + first);
      else part.store(to + first, static_cast<int>(std::min(count - first, size)));
    });
  }

  // Calls f(i, column, columns) for each vector of Scalar: i is the first of its vectors of T.
  template <class Scalar, class F>
  TRIFUSE_INLINE static void for_vectors(const F& f) {
    constexpr int step = kReduced<Scalar> ? 2 : 1;
    [&]<int... k>(std::integer_sequence<int, k...>) TRIFUSE_INLINE {
      (f(k * step, k * step * Vec::size(), step * Vec::size()), ...);
    }(std::make_integer_sequence<int, kVecs / step>());
  }

  template <class Scalar>
  void stream_whole(Scalar* to) const {
    if constexpr (kReduced<Scalar>) {
      for (int i = 0; i < kVecs; i += 2)
        stream_vector(rounded_to<Scalar>(v[i], v[i + 1]), to + i * Vec::size());
    } else {
      for (int i = 0; i < kVecs; ++i) stream_vector(v[i], to + i * Vec::size());
    }
  }

  template <class Scalar>
  void store_whole(Scalar* to) const {
    if constexpr (kReduced<Scalar>) {
      for (int i = 0; i < kVecs; i += 2)
        rounded_to<Scalar>(v[i], v[i + 1]).store(to + i * Vec::size());
    } else {
      for (int i = 0; i < kVecs; ++i) v[i].store(to + i * Vec::size());
    }
  }
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
