// bf16 and float numbers as float, back with one rounding, and exp, in plain C++ for any processor.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
  uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bf16 x) {
  uint32_t wide = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}
inline void set(float& to, float x) { to = x; }
inline void set(bf16& to, float x) {  // to the nearest, ties to even; a NaN stays one
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  to.bits = uint16_t(x == x ? rounded : 0x7fc0);
}

// exp, right to 2e-7 of itself between -87 and 88, and no smaller or larger than there beyond; a
// NaN stays one. Arithmetic only, so that it becomes vectors without a library.
inline float exponential(float x) {
  x = x < -87.f ? -87.f : x;
  x = x > 88.f ? 88.f : x;
  float whole = x * 1.44269504f + 12582912.f;  // rounds to a whole number in the low bits
  int32_t power;
  std::memcpy(&power, &whole, 4);
  whole -= 12582912.f;
  float r = x - whole * 0.693145752f;
  r -= whole * 1.42860677e-6f;
  float p = 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  int32_t scale = (power - 0x4b400000 + 127) << 23;
  float two;
  std::memcpy(&two, &scale, 4);
  return p * two;
}

inline float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }

}  // namespace

// ``half``: the numbers are bf16, else float.
#define BOTH(call, ...)                                       \
  if (half) { using T = bf16; call; } else { using T = float; call; }
