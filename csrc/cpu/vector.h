// Vector operations that ATen's Vectorized lacks: lanes chosen by the bits of a word, a fast exp2,
// sigmoid and tanh, and bit matrices.
//
// A tile of attention is 64 queries wide, so one uint64_t holds which queries attend to a key: bit
// i for query i. Masks of every kind, and dropout, are converted to 64 such words.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// For functions in an inner loop. If they were not inlined, sums would be moved from registers to
// memory.
#define TRIFUSE_INLINE __attribute__((always_inline))

namespace trifuse::TRIFUSE_CAPABILITY {

using at::vec::Vectorized;

template <class Scalar>
constexpr bool kReduced =
    std::is_same_v<Scalar, c10::BFloat16> || std::is_same_v<Scalar, c10::Half>;

constexpr uint64_t low_bits(int64_t n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

// Returns x's lanes where the low bits are set, y's elsewhere. Bits past the lanes are ignored.
template <class T>
inline Vectorized<T> select(uint64_t bits, Vectorized<T> x, Vectorized<T> y) {
  constexpr int lanes = Vectorized<T>::size();
  T chosen[lanes], other[lanes];
  x.store(chosen);
  y.store(other);
  for (int l = 0; l < lanes; ++l) chosen[l] = (bits >> l) & 1 ? chosen[l] : other[l];
  return Vectorized<T>::loadu(chosen);
}

// Returns bits: bit l is set if holds(x) is true for lane l.
template <class T, class Holds>
inline uint64_t bits_where(Vectorized<T> x, Holds holds) {
  constexpr int lanes = Vectorized<T>::size();
  T lane[lanes];
  x.store(lane);
  uint64_t bits = 0;
  for (int l = 0; l < lanes; ++l) bits |= uint64_t(holds(lane[l])) << l;
  return bits;
}

// Returns the bits of the lanes that equal a value.
template <class T>
inline uint64_t equal_bits(Vectorized<T> x, T value) {
  return bits_where(x, [value](T lane) { return lane == value; });
}

// Returns the bits of the lanes that are greater than a value.
template <class T>
inline uint64_t greater_bits(Vectorized<T> x, T value) {
  return bits_where(x, [value](T lane) { return lane > value; });
}

// Returns the larger of two numbers. If either is NaN, the result is NaN; but in float with AVX2 or
// AVX-512 it is y, which saves two instructions.
template <class T>
inline Vectorized<T> larger(Vectorized<T> x, Vectorized<T> y) {
  return at::vec::maximum(x, y);
}

// 2^x, within 1 ulp; 0 for -inf, infinity from 128 on (in float32). Vectors of float32 give 0 below
// 2^-126, because a term that small is lost beside a softmax's largest term, 1, and products of
// subnormal numbers take a hundred times as long. Swin masks pairs with -100, which would lead to
// such weights.
template <class T>
inline Vectorized<T> exp2(Vectorized<T> x) {
  return x.exp2();
}

// 2^r on [0, 1) as 1 + r q(r): the minimax polynomial of degree 6 for the relative error, 2^-28.9
// before rounding.
inline Vectorized<float> exp2_fraction(Vectorized<float> r) {
  using V = Vectorized<float>;
  V p(2.16129149696e-4f);
  p = at::vec::fmadd(p, r, V(1.24678464508e-3f));
  p = at::vec::fmadd(p, r, V(9.67545156522e-3f));
  p = at::vec::fmadd(p, r, V(5.54852806202e-2f));
  p = at::vec::fmadd(p, r, V(2.40229305552e-1f));
  p = at::vec::fmadd(p, r, V(6.93147044443e-1f));
  return at::vec::fmadd(p, r, V(1.0f));
}

// Rounds a number, or two vectors to one of a 16-bit type. The instruction for bfloat16 turns
// subnormal numbers into 0, and replaces sixteen instructions of ATen's function.
template <class Scalar, class T>
inline Scalar rounded_to(T x) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<Scalar, c10::BFloat16>) {
    Scalar rounded;
    const auto all = (__m128i)_mm_cvtneps_pbh(_mm_set_ss(x));
    std::memcpy(&rounded, &all, sizeof rounded);
    return rounded;
  }
#endif
  return static_cast<Scalar>(x);
}

template <class Scalar>
inline Vectorized<Scalar> rounded_to(Vectorized<float> low, Vectorized<float> high) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<Scalar, c10::BFloat16>)
    return Vectorized<Scalar>((__m512i)_mm512_cvtne2ps_pbh(high, low));
#endif
  return at::vec::convert_from_float<Scalar>(low, high);
}

#if defined(CPU_CAPABILITY_AVX512)

template <>
inline Vectorized<float> select(uint64_t bits, Vectorized<float> x, Vectorized<float> y) {
  return _mm512_mask_mov_ps(y, static_cast<__mmask16>(bits), x);
}

template <>
inline uint64_t equal_bits(Vectorized<float> x, float value) {
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(value), _CMP_EQ_OQ);
}

template <>
inline uint64_t greater_bits(Vectorized<float> x, float value) {
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(value), _CMP_GT_OQ);
}

template <>
inline Vectorized<float> larger(Vectorized<float> x, Vectorized<float> y) {
  return _mm512_max_ps(x, y);
}

// vreduce gives x - floor(x), and 0 for -inf; vscalef multiplies by 2^floor(x). The comparison
// keeps a NaN.
template <class Fraction>
TRIFUSE_INLINE inline Vectorized<float> exp2_by(
    Vectorized<float> x, Fraction fraction) {
  const Vectorized<float> r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, fraction(r), x);
}

template <>
inline Vectorized<float> exp2(Vectorized<float> x) {
  return exp2_by(
      x, [](Vectorized<float> r) TRIFUSE_INLINE { return exp2_fraction(r); });
}

// 2^x for weights that are then rounded to bfloat16: exact for whole x, and within 2^-22.7
// elsewhere. It treats NaN, infinities and small numbers like exp2, and takes less time. The
// fraction's polynomial is 1 + r q(r) of degree 5, the minimax one for the relative error. With
// degree 4, within 2^-18.4, a float32 logsumexp would have a larger error than in eager torch.
inline Vectorized<float> exp2_for_bfloat16(Vectorized<float> x) {
  using V = Vectorized<float>;
  return exp2_by(x, [](V r) TRIFUSE_INLINE {
    V p(1.86713021347e-3f);
    p = at::vec::fmadd(p, r, V(9.01703001846e-3f));
    p = at::vec::fmadd(p, r, V(5.57999133209e-2f));
    p = at::vec::fmadd(p, r, V(2.40164450096e-1f));
    p = at::vec::fmadd(p, r, V(6.93151311809e-1f));
    return at::vec::fmadd(p, r, V(1.0f));
  });
}

#elif defined(CPU_CAPABILITY_AVX2)

inline __m256i lanes_of(uint64_t bits) {
  const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), one), one);
}

template <>
inline Vectorized<float> select(uint64_t bits, Vectorized<float> x, Vectorized<float> y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(lanes_of(bits)));
}

template <>
inline uint64_t equal_bits(Vectorized<float> x, float value) {
  return static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(value), _CMP_EQ_OQ)));
}

template <>
inline uint64_t greater_bits(Vectorized<float> x, float value) {
  return static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(value), _CMP_GT_OQ)));
}

template <>
inline Vectorized<float> larger(Vectorized<float> x, Vectorized<float> y) {
  return _mm256_max_ps(x, y);
}

// 2^floor(x) is built in the exponent field: infinity from 2^128 on, and 0 below 2^-126.
template <>
inline Vectorized<float> exp2(Vectorized<float> x) {
  // With this order of operands, a NaN passes through the clamps.
  const __m256 clamped =
      _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
  const __m256 whole = _mm256_floor_ps(clamped);
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return exp2_fraction(Vectorized<float>(_mm256_sub_ps(clamped, whole))) * Vectorized<float>(power);
}

#endif

// `count` numbers in registers: the common base of Strip (row.h) and Units (lstm_units.h), with
// Self the derived type.
template <class Self, class T, int64_t count>
struct Lanes {
  using Vec = Vectorized<T>;
  static constexpr int kVecs = count / Vec::size();
  Vec v[kVecs];

  static Self full(T value) {
    Self s;
    for (Vec& x : s.v) x = Vec(value);
    return s;
  }

  // Applies f vector by vector.
  template <class F>
  friend Self map(F f, const Self& a) {
    Self s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = f(a.v[i]);
    return s;
  }
  template <class F>
  friend Self map(F f, const Self& a, const Self& b) {
    Self s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = f(a.v[i], b.v[i]);
    return s;
  }
  friend Self operator+(const Self& a, const Self& b) {
    return map([](Vec x, Vec y) { return x + y; }, a, b);
  }
  friend Self operator-(const Self& a, const Self& b) {
    return map([](Vec x, Vec y) { return x - y; }, a, b);
  }
  friend Self operator*(const Self& a, const Self& b) {
    return map([](Vec x, Vec y) { return x * y; }, a, b);
  }
  // a · b + c, rounded once.
  friend Self multiply_add(const Self& a, const Self& b, const Self& c) {
    Self s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = at::vec::fmadd(a.v[i], b.v[i], c.v[i]);
    return s;
  }
  // a where the low bits are set, b elsewhere.
  friend Self choose(uint64_t bits, const Self& a, const Self& b) {
    Self s;
    for (int i = 0; i < kVecs; ++i) s.v[i] = select(bits >> i * Vec::size(), a.v[i], b.v[i]);
    return s;
  }

  T total() const {
    Vec sum = v[0];
    for (int i = 1; i < kVecs; ++i) sum = sum + v[i];
    return at::vec::vec_reduce_all([](Vec& a, Vec& b) { return a + b; }, sum);
  }
};

// 1 / (1 + e^-x), within 2.5 ulp; 0 below -87 (in float32).
template <class T>
inline Vectorized<T> sigmoid(Vectorized<T> x) {
  return Vectorized<T>(T(1)) / (Vectorized<T>(T(1)) + x.neg().exp());
}

// tanh x, within 2.5 ulp.
template <class T>
inline Vectorized<T> tanh(Vectorized<T> x) {
  return x.tanh();
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)

// power · (1 + fraction), with a power of two.
struct Exponential {
  Vectorized<float> power, fraction;
};

// e^x for |x| <= 87, and NaN for NaN.
inline Exponential exponential(Vectorized<float> x) {
  using V = Vectorized<float>;
  // Adding 3 · 2^22 rounds to an integer n, which is then in the lowest bits.
  const V shift(12582912.0f), shifted = at::vec::fmadd(x, V(1.44269504f), shift);
  const V n = shifted - shift;
  // ln 2 in two parts; n times the first is exact.
  const V r = at::vec::fmadd(n, V(2.12194440e-4f), at::vec::fmadd(n, V(-0.693359375f), x));
  // (e^r - 1 - r) / r^2: the interpolant at Chebyshev's nodes, 2^-30.8 of e^r - 1 before rounding.
  // Neighbouring terms are combined first, because the chain of dependent instructions limits the
  // time.
  const V square = r * r;
  V q = at::vec::fmadd(r, V(1.98910306e-4f), V(1.39336858e-3f));
  q = at::vec::fmadd(q, square, at::vec::fmadd(r, V(8.33331048e-3f), V(4.16664630e-2f)));
  q = at::vec::fmadd(q, square, at::vec::fmadd(r, V(1.66666672e-1f), V(0.5f)));
  // 2^n: n added to the exponent of 1.
#if defined(CPU_CAPABILITY_AVX512)
  const V power = _mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_slli_epi32(_mm512_castps_si512(shifted), 23), _mm512_set1_epi32(0x3F800000)));
#else
  const V power = _mm256_castsi256_ps(_mm256_add_epi32(
      _mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(0x3F800000)));
#endif
  return {power, at::vec::fmadd(square, q, r)};
}

template <>
inline Vectorized<float> sigmoid(Vectorized<float> x) {
  using V = Vectorized<float>;
  const auto [power, fraction] = exponential(at::vec::clamp(x.neg(), V(-87.0f), V(87.0f)));
  const V sum = at::vec::fmadd(power, fraction, power + V(1.0f));
  // The comparisons keep a NaN.
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return _mm512_maskz_div_ps(positive, _mm512_set1_ps(1.0f), sum);
#else
  const __m256 positive = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(positive, _mm256_div_ps(_mm256_set1_ps(1.0f), sum));
#endif
}

// Near 0 this is x + x^3 p(x^2), the interpolant at Chebyshev's nodes, 2^-32.6 before rounding;
// elsewhere 1 - 2 / (1 + e^2x). From 9.01 on tanh rounds to 1.
template <>
inline Vectorized<float> tanh(Vectorized<float> x) {
  using V = Vectorized<float>;
  const V magnitude = at::vec::clamp_max(x.abs(), V(9.02f));
  const auto [power, fraction] = exponential(magnitude + magnitude);
  const V far = V(1.0f) - V(2.0f) / at::vec::fmadd(power, fraction, power + V(1.0f));
  const V s = x * x, square = s * s;
  V p = at::vec::fmadd(s, V(2.48752721e-3f), V(-8.49918555e-3f));
  p = at::vec::fmadd(p, square, at::vec::fmadd(s, V(2.18118876e-2f), V(-5.39640635e-2f)));
  p = at::vec::fmadd(p, square, at::vec::fmadd(s, V(1.33333221e-1f), V(-3.33333343e-1f)));
  const V near = at::vec::fmadd(magnitude * s, p, magnitude);
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 is_near = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0.5625f), _CMP_LT_OQ);
  const V result = _mm512_mask_mov_ps(far, is_near, near);
#else
  const V result = V::blendv(far, near, magnitude < V(0.5625f));
#endif
  return result | (x & V(-0.0f));  // with the sign of x
}

#endif

// Returns bits: bit t is set if byte t of 64 is not 0.
inline uint64_t nonzero_bits(const uint8_t* byte) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i x = _mm512_loadu_si512(byte);
  return _mm512_test_epi8_mask(x, x);
#else
  // Eight bytes at a time: 1 for each that is not 0, then gathered in the top byte by a product.
  uint64_t bits = 0;
  for (int t = 0; t < 64; t += 8) {
    uint64_t x;
    std::memcpy(&x, byte + t, sizeof x);
    x = ((x & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | x;
    bits |= ((x >> 7 & 0x0101010101010101) * 0x0102040810204080 >> 56) << t;
  }
  return bits;
#endif
}

// Returns bits: bit t is set if half-word t of 64 is at least the threshold. Each word holds four,
// from its low end on.
inline uint64_t at_least_bits(const uint64_t word[16], uint16_t threshold) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i t = _mm512_set1_epi16(static_cast<short>(threshold));
  const uint64_t low = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(word), t);
  const uint64_t high = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(word + 8), t);
  return low | high << 32;
#else
  uint16_t half[64];
  uint8_t kept[64];
  std::memcpy(half, word, sizeof half);
  for (int t = 0; t < 64; ++t) kept[t] = half[t] >= threshold;
  return nonzero_bits(kept);
#endif
}

// Transposes a 64 x 64 bit matrix in place: bit i of word j and bit j of word i are swapped.
inline void transpose_bits(uint64_t word[64]) {
#if defined(CPU_CAPABILITY_AVX512)
  // Takes t where `mask` has ones, w elsewhere.
  const auto mix = [](__m512i mask, __m512i t, __m512i w) {
    return _mm512_ternarylogic_epi64(mask, t, w, 0xCA);
  };
  const auto masks = [](uint64_t mask) { return _mm512_set1_epi64(static_cast<int64_t>(mask)); };
  __m512i row[8];
  for (ptrdiff_t v = 0; v < 8; ++v) row[v] = _mm512_loadu_si512(word + 8 * v);
  // Words 32, 16 and 8 apart lie in different vectors.
  const auto between = [&]<int size>(uint64_t mask) TRIFUSE_INLINE {
    for (int v = 0; v < 8; ++v) {
      constexpr int step = size / 8;
      if (v & step) continue;
      const __m512i low = row[v], high = row[v + step];
      row[v] = mix(masks(mask << size), _mm512_slli_epi64(high, size), low);
      row[v + step] = mix(masks(mask), _mm512_srli_epi64(low, size), high);
    }
  };
  between.template operator()<32>(0x00000000FFFFFFFF);
  between.template operator()<16>(0x0000FFFF0000FFFF);
  between.template operator()<8>(0x00FF00FF00FF00FF);
  // Closer words are lanes of one vector. A rotation moves a lane's bits up if it is the lower of
  // its pair, and down if it is the upper.
  const auto within = [&](int size, uint64_t mask, __m512i order) TRIFUSE_INLINE {
    alignas(64) uint64_t turn[8], taken[8];
    for (int k = 0; k < 8; ++k) {
      turn[k] = k & size ? 64 - size : size;
      taken[k] = k & size ? mask : mask << size;
    }
    const __m512i turns = _mm512_load_si512(turn), takes = _mm512_load_si512(taken);
    for (auto& x : row)
      x = mix(takes, _mm512_rolv_epi64(_mm512_permutexvar_epi64(order, x), turns), x);
  };
  within(4, 0x0F0F0F0F0F0F0F0F, _mm512_setr_epi64(4, 5, 6, 7, 0, 1, 2, 3));
  within(2, 0x3333333333333333, _mm512_setr_epi64(2, 3, 0, 1, 6, 7, 4, 5));
  within(1, 0x5555555555555555, _mm512_setr_epi64(1, 0, 3, 2, 5, 4, 7, 6));
  for (ptrdiff_t v = 0; v < 8; ++v) _mm512_storeu_si512(word + 8 * v, row[v]);
#else
  uint64_t mask = 0x00000000FFFFFFFF;
  for (int size = 32; size; size >>= 1, mask ^= mask << size) {
    for (int block = 0; block < 64; block += 2 * size) {
      for (int k = block; k < block + size; ++k) {
        const uint64_t swap = ((word[k] >> size) ^ word[k + size]) & mask;
        word[k + size] ^= swap;
        word[k] ^= swap << size;
      }
    }
  }
#endif
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
