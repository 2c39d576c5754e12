// Tiles of bf16 for AMX, and the ways a matrix is laid out as tiles.
//
// A tile product is C (16 x 16 float) += A (16 x 32 bf16) * B (32 x 16 bf16). A's rows lie as they
// are; B holds two consecutive k of one column in one 32-bit word ("pairs"), so that its 16 rows of
// 64 bytes are 16 pairs of k by 16 columns. Each layout below writes whole tiles of 1 KB, with
// zeros where the matrix ends, so that no product needs an edge case.
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.)
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "scratch.h"

typedef uint16_t bf16;
constexpr int TILE = 16;    // rows, and columns of float or of pairs
constexpr int DEPTH = 32;   // bf16 in a row of A: the k of one tile product
constexpr int WORDS = 512;  // bf16 in a tile

inline int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Tile registers are off until a process asks for them, once (Linux, ARCH_REQ_XCOMP_PERM).
inline bool amx_permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// All eight registers as full tiles, on this thread, for the life of the object.
struct Registers {
  Registers() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = TILE;
    _tile_loadconfig(&shape);
  }
  ~Registers() { _tile_release(); }
};

inline __mmask16 upto(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
inline __mmask32 upto32(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

inline __m512 widen(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

// 16 x 16 words of 32 bits, in place.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// One tile from 16 rows x 32 contiguous columns; ``rows`` x ``columns`` of them exist.
inline void load_rows(const bf16* from, int64_t stride, int64_t rows, int64_t columns,
                      __m512i r[16]) {
  __mmask32 mask = upto32(columns);
  for (int i = 0; i < TILE; i++)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
}

// Two tiles of pairs from 32 rows x 32 columns: word (r, c) is rows 2r and 2r + 1 of column c, the
// first 16 columns in ``left``. Whole cache lines are read, since rows are often a page apart.
inline void load_pairs(const bf16* from, int64_t stride, int64_t rows, int64_t columns,
                       __m512i left[16], __m512i right[16]) {
  __mmask32 mask = upto32(columns);
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
      3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int i = 0; i < TILE; i++) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    if (2 * i < rows) even = _mm512_maskz_loadu_epi16(mask, from + 2 * i * stride);
    if (2 * i + 1 < rows) odd = _mm512_maskz_loadu_epi16(mask, from + (2 * i + 1) * stride);
    left[i] = _mm512_permutex2var_epi16(even, low, odd);
    right[i] = _mm512_permutex2var_epi16(even, high, odd);
  }
}

inline void put(bf16* tile, const __m512i r[16]) {
  for (int i = 0; i < TILE; i++) _mm512_store_si512(tile + i * DEPTH, r[i]);
}

// A from a matrix whose rows are A's rows (k contiguous).
inline void a_from_rows(const bf16* from, int64_t stride, int64_t rows, int64_t ks, bf16* tile) {
  __m512i r[16];
  load_rows(from, stride, rows, ks, r);
  put(tile, r);
}

// Two tiles of A, ``next`` apart, from a matrix whose rows are k (A's rows contiguous).
inline void a_from_columns(const bf16* from, int64_t stride, int64_t ks, int64_t rows, bf16* tile,
                           int64_t next) {
  __m512i left[16], right[16];
  load_pairs(from, stride, ks, rows, left, right);
  transpose(left);
  put(tile, left);
  transpose(right);
  put(tile + next, right);
}

// Two tiles of B, ``next`` apart, from a matrix whose rows are k (B's columns contiguous).
inline void b_from_rows(const bf16* from, int64_t stride, int64_t ks, int64_t columns, bf16* tile,
                        int64_t next) {
  __m512i left[16], right[16];
  load_pairs(from, stride, ks, columns, left, right);
  put(tile, left);
  put(tile + next, right);
}

// B from a matrix whose rows are B's columns (k contiguous).
inline void b_from_columns(const bf16* from, int64_t stride, int64_t columns, int64_t ks,
                           bf16* tile) {
  __m512i r[16];
  load_rows(from, stride, columns, ks, r);
  transpose(r);
  put(tile, r);
}

// GCC's tile loads don't say that they read memory: what was stored before must be there by now.
inline void visible() { asm volatile("" ::: "memory"); }

// Two by two tiles of C over ``steps`` tiles of k: registers 0..3 are C, 4 and 5 A, 6 and 7 B.
// ``a_next`` and ``b_next`` lead from one row or column of tiles to the other, in bf16.
inline void multiply(const bf16* a, int64_t a_next, const bf16* b, int64_t b_next, int64_t steps) {
  visible();
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(4, a + k * WORDS, 64);
    _tile_loadd(6, b + k * WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + b_next + k * WORDS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_next + k * WORDS, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline void zero_c() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// C lies as four float tiles, ``row`` and ``column`` floats from one to the next, ``stride`` bytes
// from line to line.
inline void load_c(const float* c, int64_t row, int64_t column, int64_t stride) {
  visible();
  _tile_loadd(0, c, stride);
  _tile_loadd(1, c + column, stride);
  _tile_loadd(2, c + row, stride);
  _tile_loadd(3, c + row + column, stride);
}

inline void store_c(float* c, int64_t row, int64_t column, int64_t stride) {
  _tile_stored(0, c, stride);
  _tile_stored(1, c + column, stride);
  _tile_stored(2, c + row, stride);
  _tile_stored(3, c + row + column, stride);
}
