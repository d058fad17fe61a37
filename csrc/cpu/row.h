// Rows of a matrix, a strip of 64 columns at a time: as many as one word of dropout bits decides on.

#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cstdint>

#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kStrip = 64;

// 64 neighbouring columns, in registers.
template <class T>
struct Strip {
  using Vec = Vectorized<T>;
  static constexpr int kVecs = kStrip / Vec::size();
  Vec v[kVecs];

  static Strip full(T value) {
    Strip s;
    for (auto& v : s.v) v = Vec(value);
    return s;
  }

  // `count` columns, 0 past them.
  template <class Scalar>
  static Strip load(const Scalar* from, int64_t count = kStrip) {
    if (count >= kStrip) return load_whole(from);
    alignas(64) Scalar padded[kStrip] = {};
    std::copy_n(from, count, padded);
    return load_whole(padded);
  }

  template <class Scalar>
  void store(Scalar* to, int64_t count = kStrip) const {
    if (count >= kStrip) return store_whole(to);
    alignas(64) Scalar padded[kStrip];
    store_whole(padded);
    std::copy_n(padded, count, to);
  }

  // Lane by lane.
  template <class F>
  friend Strip map(F f, const Strip& a) {
    Strip s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = f(a.v[i]);
    return s;
  }
  template <class F>
  friend Strip map(F f, const Strip& a, const Strip& b) {
    Strip s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = f(a.v[i], b.v[i]);
    return s;
  }
  friend Strip operator+(const Strip& a, const Strip& b) {
    return map([](Vec x, Vec y) { return x + y; }, a, b);
  }
  friend Strip operator-(const Strip& a, const Strip& b) {
    return map([](Vec x, Vec y) { return x - y; }, a, b);
  }
  friend Strip operator*(const Strip& a, const Strip& b) {
    return map([](Vec x, Vec y) { return x * y; }, a, b);
  }
  // a · b + c, rounded once.
  friend Strip multiply_add(const Strip& a, const Strip& b, const Strip& c) {
    Strip s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = at::vec::fmadd(a.v[i], b.v[i], c.v[i]);
    return s;
  }

  // 0 where a bit is not set.
  Strip keep(uint64_t bits) const {
    Strip s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = select(bits >> i * Vec::size(), v[i], Vec(T(0)));
    return s;
  }

  T total() const {
    Vec sum = v[0];
    for (int i = 1; i < kVecs; ++i) sum = sum + v[i];
    return at::vec::vec_reduce_all([](Vec& a, Vec& b) { return a + b; }, sum);
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

  template <class Scalar>
  void store_whole(Scalar* to) const {
    if constexpr (kReduced<Scalar>) {
      for (int i = 0; i < kVecs; i += 2)
        at::vec::convert_from_float<Scalar>(v[i], v[i + 1]).store(to + i * Vec::size());
    } else {
      for (int i = 0; i < kVecs; ++i) v[i].store(to + i * Vec::size());
    }
  }
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
