// A block of numbers as codes of 8, 4 or 1 bits with one bf16 scale, and back. Every result has the
// bits that ``codec_reference.py`` defines; so nothing here may be rounded differently where a compiler
// fuses a product with a sum: products that are added are exact (a code times a bf16 scale has at most
// 16 bits), and those that aren't exact are only rounded to whole numbers or stored.
#pragma once
#include <algorithm>
#include <type_traits>

#include "numbers.h"

namespace {

constexpr int LARGEST_BLOCK = 4096;
constexpr int LANES = 16;
constexpr int32_t INFINITE = 0x7f800000;
constexpr int32_t SUMMED = (115 + 127) << 23;  // see codec_reference.py
constexpr uint16_t NOT_A_NUMBER = 0x7fc0;

inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline int32_t magnitude(float x) { return bits_of(x) & 0x7fffffff; }  // ordered as |x| is
inline float from_bits(int32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// "lowbias32" of Wellons, Prospecting for Hash Functions (nullprogram.com, 2018).
inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ x >> 16;
}

// What a scale is made by: see ``Rule`` in codec_reference.py.
struct Rule {
  float share;   // 1 / the largest code
  int32_t low;   // magnitudes below it are sent as zero
  int32_t cap;   // bits of the largest scale, as bf16
  int32_t most;  // the largest code
  int32_t dice;  // whether codes are rounded at random
  uint32_t key;
};

// x + rest of one block, filled up with zeros; the largest magnitude. ``rest`` may be null.
template <class T, class Side>
inline int32_t read(const T* x, const float* rest, float* v, int64_t len, Side side) {
  int64_t n = len < side ? len : int64_t(side);
  if (len >= side) {  // a count the compiler knows
    if (rest) for (int i = 0; i < side; i++) v[i] = get(x[i]) + rest[i];
    else for (int i = 0; i < side; i++) v[i] = get(x[i]);
  } else {
    for (int i = 0; i < n; i++) v[i] = get(x[i]);
    if (rest) for (int i = 0; i < n; i++) v[i] += rest[i];
    for (int i = n; i < side; i++) v[i] = 0;
  }
  int32_t largest = 0;
  for (int i = 0; i < side; i++) largest = std::max(largest, magnitude(v[i]));
  return largest;
}

inline uint16_t scale_of(int32_t largest, const Rule& rule) {
  if (largest >= INFINITE) return NOT_A_NUMBER;
  if (largest < rule.low) return 0;
  int32_t up = (bits_of(from_bits(largest) * rule.share) + 0xffff) >> 16;
  return uint16_t(std::min(up, rule.cap));
}

template <class Side>
inline void round_codes(const float* v, int32_t* q, float inverse, const Rule& rule, int64_t first,
                        Side side) {
  if (rule.dice) {
    float fine = inverse * 65536.f;
    for (int i = 0; i < side; i++) {
      int32_t noise = int32_t(mixed(uint32_t(first + i) + rule.key) >> 16);
      q[i] = (int32_t(nearbyintf(v[i] * fine)) + noise) >> 16;
    }
  } else {
    for (int i = 0; i < side; i++) q[i] = int32_t(nearbyintf(v[i] * inverse));
  }
  for (int i = 0; i < side; i++) q[i] = std::min(std::max(q[i], -rule.most), rule.most);
}

// The mean magnitude in bf16; its sum in the order that codec_reference.py gives.
template <class Side>
inline uint16_t mean_of(const float* v, int64_t len, Side side) {
  alignas(64) float lanes[LANES] = {};
  for (int i = 0; i < side; i += LANES)
    for (int j = 0; j < LANES; j++) lanes[j] += std::fabs(v[i + j]);
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
  bf16 mean;
  set(mean, lanes[0] / float(std::min<int64_t>(len, side)));
  return mean.bits;
}

// The same as ``encode_block`` in one bit each: eighth k of the block is bit k of its bytes.
template <class T, class Side>
inline void sign_block(const T* x, const float* rest, float* kept, uint8_t* codes, uint16_t* scale,
                       int64_t len, Side side) {
  alignas(64) float v[LARGEST_BLOCK];
  alignas(64) int32_t byte[LARGEST_BLOCK / 8];
  const int eighth = side / 8, n = int(std::min<int64_t>(len, side));
  if (read(x, rest, v, len, side) >= SUMMED) {
    *scale = NOT_A_NUMBER;
    std::memset(codes, 0, eighth);
    if (kept && kept != rest) std::memmove(kept, rest, n * sizeof(float));
    return;
  }
  *scale = mean_of(v, len, side);
  for (int i = 0; i < eighth; i++) byte[i] = 0;
  for (int k = 0; k < 8; k++)
    for (int i = 0; i < eighth; i++) byte[i] |= int32_t(v[k * eighth + i] < 0) << k;
  for (int i = 0; i < eighth; i++) codes[i] = uint8_t(byte[i]);
  if (!kept) return;
  float s = from_bits(int32_t(*scale) << 16);
  for (int i = 0; i < n; i++) kept[i] = v[i] - (v[i] < 0 ? -s : s);
}

template <int BITS, class T, class Side>
inline void encode_block(const T* x, const float* rest, float* kept, uint8_t* codes,
                         uint16_t* scale, int64_t first, int64_t len, const Rule& rule,
                         Side side) {
  if (BITS == 1) return sign_block(x, rest, kept, codes, scale, len, side);
  alignas(64) float v[LARGEST_BLOCK];
  alignas(64) int32_t q[LARGEST_BLOCK];
  const int half = side / 2;
  *scale = scale_of(read(x, rest, v, len, side), rule);
  if (*scale == 0 || *scale == NOT_A_NUMBER) {  // nothing is sent, so all is kept
    std::memset(codes, 0, side * BITS / 8);
    const float* all = *scale ? rest : v;
    if (kept && kept != all) std::memmove(kept, all, std::min<int64_t>(len, side) * sizeof(float));
    return;
  }
  float s = from_bits(int32_t(*scale) << 16);
  round_codes(v, q, 1.f / s, rule, first, side);
  if (BITS == 8)
    for (int i = 0; i < side; i++) codes[i] = uint8_t(q[i]);
  else
    for (int i = 0; i < half; i++) codes[i] = uint8_t((q[i] & 15) | (q[i + half] & 15) << 4);
  if (!kept) return;
  if (len >= side)
    for (int i = 0; i < side; i++) kept[i] = v[i] - float(q[i]) * s;
  else
    for (int i = 0; i < len; i++) kept[i] = v[i] - float(q[i]) * s;
}

// The values of one block of one message, put into ``to`` or added to what is there.
template <int BITS, bool ADD, class Side>
inline void values(const uint8_t* codes, float s, float* to, Side side) {
  const int half = side / 2;
  auto put = [&](int i, int32_t q) { to[i] = ADD ? to[i] + float(q) * s : float(q) * s; };
  if (BITS == 8) {
    for (int i = 0; i < side; i++) put(i, int8_t(codes[i]));
  } else if (BITS == 1) {
    const int eighth = side / 8;
    for (int k = 0; k < 8; k++)
      for (int i = 0; i < eighth; i++) put(k * eighth + i, 1 - (codes[i] >> k & 1) * 2);
  } else {
    for (int i = 0; i < half; i++) put(i, int32_t(uint32_t(codes[i]) << 28) >> 28);
    for (int i = 0; i < half; i++) put(i + half, int8_t(codes[i]) >> 4);
  }
}

template <class Run>
void with_side(int64_t block, Run run) {
  if (block == 256) run(std::integral_constant<int, 256>());
  else run(int(block));
}

}  // namespace
