// What a processor multiplies with, and how a matrix is laid out for it.
//
// A product is C (m x n float) = A (m x k) B (k x n). The registers hold ROWS x COLUMNS sums of C.
// k is counted in words: a word is one float, or a pair of bf16 that follow each other along k. B
// is laid out as panels of COLUMNS columns, word after word. A is read word by word and row by row
// with any distances, so that it needs a plain copy or none.
//
// ``Floats`` serve every processor: the compiler turns a product and a sum into one instruction.
// bf16 becomes float while it is laid out, so that it costs what float32 costs. ``Pairs`` are the
// words of processors with bf16 products (vdpbf16ps), on AMD's twice as fast as float32.
#pragma once
#include <algorithm>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"
#include "scratch.h"

namespace {

template <int LANES_, int ROWS_, int VECTORS_>
struct Floats {
  typedef float Word;
  typedef float Vec __attribute__((vector_size(LANES_ * 4)));
  typedef Vec Loaded;
  static constexpr int LANES = LANES_, ROWS = ROWS_, VECTORS = VECTORS_, EACH = 1;
  static Vec add(Vec sum, Word a, Loaded b) { return sum + (a - Vec{}) * b; }
  template <class T>
  static Word word(const T* x, int64_t, bool) {
    return get(*x);
  }
};

// Two bf16 in 32 bits, the first in the low half.
template <int LANES_, int ROWS_, int VECTORS_>
struct Pairs {
  typedef uint32_t Word;
  typedef float Vec __attribute__((vector_size(LANES_ * 4)));
  typedef uint32_t Loaded __attribute__((vector_size(LANES_ * 4)));
  static constexpr int LANES = LANES_, ROWS = ROWS_, VECTORS = VECTORS_, EACH = 2;
  static Vec add(Vec sum, Word a, Loaded b) {
#if defined(__AVX512BF16__)
    if constexpr (LANES_ == 16)
      return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
#endif
    Loaded same = a - Loaded{}, high = same & 0xffff0000u, low = same << 16;
    return sum + (Vec)low * (Vec)(b << 16) + (Vec)high * (Vec)(b & 0xffff0000u);
  }
  static uint16_t bits(bf16 x) { return x.bits; }
  static uint16_t bits(float x) {
    bf16 narrow;
    set(narrow, x);
    return narrow.bits;
  }
  template <class T>
  static Word word(const T* x, int64_t next, bool both) {
    return bits(*x) | (both ? uint32_t(bits(x[next])) << 16 : 0);
  }
};

#if defined(__AVX512F__)
typedef Floats<16, 12, 2> Wide;
#elif defined(__AVX2__) && defined(__FMA__)
typedef Floats<8, 6, 2> Wide;
#else
typedef Floats<4, 6, 2> Wide;
#endif
#if defined(__AVX512BF16__)
typedef Pairs<16, 12, 2> Narrow;
#elif defined(HASTEN_PROVE_PAIRS)
typedef Pairs<8, 4, 1> Narrow;  // slow: for the proof that the layout is right
#else
typedef Wide Narrow;
#endif

// L numbers of memory as floats, and back. The compiler makes several times as many instructions of
// a loop over ``get`` and ``set`` of bf16.
template <int L>
struct Lanes {
  typedef float Vec __attribute__((vector_size(L * 4)));
  typedef Vec Near __attribute__((aligned(4)));
  typedef uint32_t Bits __attribute__((vector_size(L * 4)));
  typedef uint16_t Half __attribute__((vector_size(L * 2), aligned(2)));
};
template <int L>
inline typename Lanes<L>::Vec load(const float* from) {
  return *(const typename Lanes<L>::Near*)from;
}
template <int L>
inline typename Lanes<L>::Vec load(const bf16* from) {
  typedef typename Lanes<L>::Bits Bits;
  Bits wide = __builtin_convertvector(*(const typename Lanes<L>::Half*)from, Bits) << 16;
  return (typename Lanes<L>::Vec)wide;
}
template <int L>
inline void store(float* to, typename Lanes<L>::Vec x) {
  *(typename Lanes<L>::Near*)to = x;
}
template <int L>
inline void store(bf16* to, typename Lanes<L>::Vec x) {  // as ``set``
#if defined(__AVX512BF16__)
  if constexpr (L == 16) {  // below 2^-126 it gives 0
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    return;
  }
#endif
  typedef typename Lanes<L>::Bits Bits;
  typedef typename Lanes<L>::Half Half;
  Bits wide = (Bits)x, rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  rounded = x == x ? rounded : 0x7fc0 - Bits{};
  *(Half*)to = __builtin_convertvector(rounded, Half);
}

inline int64_t ceil_to(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

// Lines of memory that are read soon, asked for a few at a time.
struct Ahead {
  const char* row;
  int64_t width, stride, rows, at;  // bytes of a row, bytes to the next one, rows left, byte in the row
  int64_t lines() const { return (width + 63) / 64 * rows; }
  void ask(int64_t count) {
    for (; count > 0 && rows > 0; count--) {
      __builtin_prefetch(row + at, 0, 2);
      if ((at += 64) >= width) at = 0, row += stride, rows--;
    }
  }
};

// A matrix in memory: ``line`` numbers from one row of A or column of B to the next, ``k`` along k.
// One of the two is 1.
template <class T>
struct Matrix {
  const T* at;
  int64_t line, k;
  Matrix from(int64_t first, int64_t depth) const { return {at + first * line + depth * k, line, k}; }
  Ahead ahead(int64_t lines, int64_t depth) const {
    int64_t size = sizeof(T), wide = k == 1 ? depth : lines;
    return {(const char*)at, wide * size, (k == 1 ? line : k) * size, k == 1 ? lines : depth, 0};
  }
};

#if defined(__AVX2__)
// 8 x 8 words of 32 bits, turned.
inline void turn(const uint32_t* from, int64_t next, uint32_t* to, int64_t step) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float*)(from + i * next));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps((float*)(to + i * step), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps((float*)(to + (i + 4) * step), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#endif

#if defined(__AVX512BF16__)
// 16 words of two rows of memory, ``next`` numbers apart; ``both``: there is a second row.
inline __m512i pairs(const bf16* one, int64_t next, bool both, __mmask16 which) {
  __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, one));
  if (!both) return low;
  __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, one + next));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif

// B's ``columns`` columns over ``depth`` of k as one panel of ``words`` x COLUMNS words.
template <class Unit, class T>
void panel(Matrix<T> b, int64_t columns, int64_t depth, typename Unit::Word* to) {
  constexpr int C = Unit::VECTORS * Unit::LANES, E = Unit::EACH;
  int64_t words = (depth + E - 1) / E, done = 0;
  if (columns < C) std::memset((void*)to, 0, words * C * 4);
  if (b.line == 1) {
    auto copy = [&](auto count) {
      for (int64_t w = 0; w < words; w++) {
        const T* from = b.at + w * E * b.k;
        bool both = E * w + 1 < depth;
        int i = 0;
#if defined(__AVX512BF16__)
        if constexpr (E == 2 && std::is_same<T, bf16>::value)
          for (; i + 16 <= count; i += 16)
            _mm512_storeu_si512(to + w * C + i, pairs(from + i, b.k, both, 0xffff));
#endif
        for (; i < count; i++) to[w * C + i] = Unit::word(from + i, b.k, both);
      }
    };
    if (columns == C) copy(std::integral_constant<int, C>());
    else copy(int(columns));
    return;
  }
#if defined(__AVX2__)
  if constexpr (sizeof(T) * E == 4)  // a word is what lies in memory
    if (columns == C)
      for (; (done + 8) * E <= depth; done += 8)
        for (int i = 0; i < C; i += 8) {
          int64_t next = b.line / E;
          const T* from = b.at + i * b.line + done * E;
          if (b.line % E == 0)
            turn((const uint32_t*)from, next, (uint32_t*)(to + done * C + i), C);
          else
            for (int j = 0; j < 8; j++)
              for (int w = 0; w < 8; w++)
                to[(done + w) * C + i + j] = Unit::word(from + j * b.line + w * E, 1, true);
        }
#endif
  for (; done < words; done += 16)
    for (int i = 0; i < columns; i++)
      for (int64_t w = done; w < std::min(done + 16, words); w++)
        to[w * C + i] = Unit::word(b.at + i * b.line + w * E, 1, E * w + 1 < depth);
}

// A as the registers read it: ``row`` words from row to row, ``step`` from one word of k to the
// next, ``block`` from the first of ROWS rows to the first of the next.
template <class Word>
struct Left {
  const Word* at;
  int64_t row, step, block;
  Left from(int64_t blocks) const { return {at + blocks * block, row, step, block}; }
};

// ``rows`` of A over ``depth`` of k, with rows of zeros up to a multiple of ROWS.
template <class Unit, class T>
Left<typename Unit::Word> left(Matrix<T> a, int64_t rows, int64_t depth, typename Unit::Word* to) {
  typedef typename Unit::Word Word;
  constexpr int E = Unit::EACH;
  int64_t words = (depth + E - 1) / E, full = ceil_to(rows, Unit::ROWS);
  if (a.line == 1) {  // words of one k side by side: as B's panels, of ROWS each
    constexpr int R = Unit::ROWS;
    for (int64_t w = 0; w < words; w++) {  // rows of memory in turn: each may be another page
      const T* from = a.at + w * E * a.k;
      bool both = E * w + 1 < depth;
      Word* at = to + w * R;
      int64_t i = 0;
      for (; i + R <= rows; i += R, at += R * words)
#if defined(__AVX512BF16__)
        if constexpr (E == 2 && std::is_same<T, bf16>::value)
          _mm512_mask_storeu_epi32(at, (1 << R) - 1, pairs(from + i, a.k, both, (1 << R) - 1));
        else
#endif
        if constexpr (std::is_same<T, Word>::value)
          std::memcpy(at, from + i, R * sizeof(Word));
        else
          for (int r = 0; r < R; r++) at[r] = Unit::word(from + i + r, a.k, both);
      if (i < rows)
        for (int r = 0; r < R; r++) at[r] = i + r < rows ? Unit::word(from + i + r, a.k, both) : Word();
    }
    return {to, 1, R, R * words};
  }
  int64_t pitch = ceil_to(words, 16) + 16;  // rows that don't share a set of the first cache
  for (int64_t i = 0; i < full; i++) {
    Word* row = to + i * pitch;
    if (i >= rows) {
      std::memset((void*)row, 0, words * 4);
      continue;
    }
    const T* from = a.at + i * a.line;
    int64_t whole = depth / E;
    for (int64_t w = 0; w < whole; w++) row[w] = Unit::word(from + w * E, 1, true);
    if (whole < words) row[whole] = Unit::word(from + whole * E, 1, false);
  }
  return {to, pitch, 1, Unit::ROWS * pitch};
}
inline int64_t left_room(int64_t rows, int64_t words) { return (rows + 16) * (ceil_to(words, 16) + 16); }

// ROWS x COLUMNS sums over ``words`` words of k to ``c``, added to what is there where ``go_on``, and to
// those at ``before`` where given.
template <class Unit, class Out>
__attribute__((always_inline)) inline void multiply(Left<typename Unit::Word> a,
                                                    const typename Unit::Word* b, int64_t words,
                                                    Out* c, int64_t stride, bool go_on,
                                                    const float* before = nullptr,
                                                    int64_t pitch = 0) {
  typedef typename Unit::Vec Vec;
  typedef typename Unit::Loaded Loaded;
  typedef Loaded Panel __attribute__((aligned(4)));  // no address is a multiple of a vector's size
  constexpr int R = Unit::ROWS, V = Unit::VECTORS, L = Unit::LANES;
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    __builtin_prefetch(c + i * stride, 1);  // there when the sums are
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[i][v] = Vec{};
  }
  const typename Unit::Word* at = a.at;
  int64_t row = a.row, step = a.step;
  for (int64_t w = 0; w < words; w++, at += step, b += V * L) {
    Loaded y[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) y[v] = *(const Panel*)(b + v * L);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      typename Unit::Word x = at[i * row];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[i][v] = Unit::add(sums[i][v], x, y[v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      Out* to = c + i * stride + v * L;
      if (before) sums[i][v] += load<L>(before + i * pitch + v * L);
      store<L>(to, go_on ? load<L>(to) + sums[i][v] : sums[i][v]);
    }
}

}  // namespace
