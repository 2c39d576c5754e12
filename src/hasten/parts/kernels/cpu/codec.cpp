// What travels between ranks, made small and large again: numbers in blocks as int8 or int4 with one
// bf16 scale each, and the k largest of each chunk of 256. Every result has the bits that
// ``codec_torch.py`` defines; so nothing here may be rounded differently where a compiler fuses a
// product with a sum: products that are added are exact (a code times a bf16 scale has at most 16
// bits), and those that aren't exact are only rounded to whole numbers or stored.
#include <algorithm>
#include <type_traits>

#include "numbers.h"

namespace {

constexpr int LARGEST_BLOCK = 4096;
constexpr int CHUNK = 256;
constexpr int32_t INFINITE = 0x7f800000;
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

// What a scale is made by: see ``Rule`` in codec_torch.py.
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

template <int BITS, class T, class Side>
inline void encode_block(const T* x, const float* rest, float* kept, uint8_t* codes,
                         uint16_t* scale, int64_t first, int64_t len, const Rule& rule,
                         Side side) {
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

template <int BITS, class T, class Side>
void encode(const T* x, const float* rest, float* kept, uint8_t* codes, uint16_t* scales,
            int64_t n, const Rule& rule, int threads, Side side) {
  int64_t blocks = (n + side - 1) / side, bytes = side * BITS / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    int64_t at = b * side;
    encode_block<BITS>(x + at, rest ? rest + at : nullptr, kept ? kept + at : nullptr,
                       codes + b * bytes, scales + b, at, n - at, rule, side);
  }
}

// The values of one block of one message, put into ``to`` or added to what is there.
template <int BITS, bool ADD, class Side>
inline void values(const uint8_t* codes, float s, float* to, Side side) {
  const int half = side / 2;
  auto put = [&](int i, int32_t q) { to[i] = ADD ? to[i] + float(q) * s : float(q) * s; };
  if (BITS == 8) {
    for (int i = 0; i < side; i++) put(i, int8_t(codes[i]));
  } else {
    for (int i = 0; i < half; i++) put(i, int32_t(uint32_t(codes[i]) << 28) >> 28);
    for (int i = 0; i < half; i++) put(i + half, int8_t(codes[i]) >> 4);
  }
}

// The messages of ``ranks``, so many bytes apart, summed in their order, times ``factor``.
template <int BITS, bool ADD, class Side>
void decode(const uint8_t* codes, int64_t apart, const uint8_t* scales, int64_t scales_apart,
            int64_t ranks, int64_t n, float factor, float* out, int threads, Side side) {
  int64_t blocks = (n + side - 1) / side, bytes = side * BITS / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    alignas(64) float sum[LARGEST_BLOCK];
    int64_t at = b * side, len = std::min<int64_t>(n - at, side);
    auto scale = [&](int64_t r) {
      uint16_t bits;
      std::memcpy(&bits, scales + r * scales_apart + 2 * b, 2);
      return from_bits(int32_t(uint32_t(bits) << 16));
    };
    const uint8_t* p = codes + b * bytes;
    if (ranks == 1 && len == side) {
      values<BITS, ADD>(p, scale(0), out + at, side);
      continue;
    }
    values<BITS, false>(p, scale(0), sum, side);
    for (int64_t r = 1; r < ranks; r++) values<BITS, true>(p + r * apart, scale(r), sum, side);
    if (ADD)  // of one message only, so that no factor is fused with this sum
      for (int i = 0; i < len; i++) out[at + i] += sum[i];
    else
      for (int i = 0; i < len; i++) out[at + i] = sum[i] * factor;
  }
}

template <class Run>
void with_side(int64_t block, Run run) {
  if (block == 256) run(std::integral_constant<int, 256>());
  else run(int(block));
}

// How many of a chunk are at least ``least``; in the numbers' own format, to fill vectors with them.
template <class N>
inline int at_least(const N* a, N least) {
  N count = 0;
  for (int i = 0; i < CHUNK; i++) count = N(count + (a[i] >= least));
  return count;
}

// The k-th largest magnitude of a chunk, or one that just as many reach, bit by bit: first the upper
// halves, of which a vector holds twice as many.
inline int32_t border_of(const int32_t* a, int k) {
  alignas(64) int16_t upper[CHUNK];
  for (int i = 0; i < CHUNK; i++) upper[i] = int16_t(a[i] >> 16);
  int16_t high = 0;
  for (int bit = 1 << 14; bit; bit >>= 1) {
    int16_t tried = int16_t(high | bit);
    int count = at_least(upper, tried);
    if (count >= k) high = tried;
    if (count == k) return int32_t(high) << 16;
  }
  int32_t border = int32_t(high) << 16;
  for (int32_t bit = 1 << 15; bit; bit >>= 1) {
    int count = at_least(a, border | bit);
    if (count >= k) border |= bit;
    if (count == k) break;
  }
  return border;
}

// The k largest magnitudes of a chunk, ties by the lowest place; places in their order.
inline void choose(const int32_t* a, int k, uint8_t* places) {
  const int32_t border = border_of(a, k);
  alignas(64) uint8_t above[CHUNK], equal[CHUNK];
  for (int i = 0; i < CHUNK; i++) above[i] = a[i] > border;
  for (int i = 0; i < CHUNK; i++) equal[i] = a[i] == border;
  int ties = k, n = 0;
  for (int i = 0; i < CHUNK; i++) ties -= above[i];
  for (int first = 0; first < CHUNK; first += 8) {  // most eights have none, and one look says so
    uint64_t some, more;  // a byte for each number, the first in the lowest
    std::memcpy(&some, above + first, 8);
    std::memcpy(&more, equal + first, 8);
    for (; more && ties; ties--, more &= more - 1) some |= more & -more;
    for (; some; some &= some - 1) places[n++] = uint8_t(first + (__builtin_ctzll(some) >> 3));
  }
}

template <class T>
void topk_encode(const T* x, const float* rest, float* kept, uint8_t* places, uint16_t* sent,
                 int64_t n, int k, int threads) {
  int64_t chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < chunks; c++) {
    alignas(64) float v[CHUNK];
    alignas(64) int32_t a[CHUNK];
    int64_t at = c * CHUNK, len = std::min<int64_t>(n - at, CHUNK);
    uint8_t* chosen = places + c * k;
    int32_t largest = read(x + at, rest ? rest + at : nullptr, v, len,
                           std::integral_constant<int, CHUNK>());
    for (int i = 0; i < CHUNK; i++) a[i] = magnitude(v[i]);
    choose(a, k, chosen);
    bool whole = largest < 0x7f7f8000;  // from here on bf16 has no finite number
    for (int j = 0; j < k; j++) {
      bf16 rounded;
      float& value = v[chosen[j]];
      set(rounded, value);
      sent[c * k + j] = rounded.bits;
      value -= get(rounded);
    }
    if (!kept) continue;
    const float* all = whole ? v : rest + at;
    if (kept + at != all) std::memmove(kept + at, all, len * sizeof(float));
  }
}

void topk_decode(const uint8_t* places, int64_t apart, const uint8_t* sent, int64_t sent_apart,
                 int64_t ranks, int64_t n, int k, float factor, bool add, float* out,
                 int threads) {
  int64_t chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < chunks; c++) {
    float sum[CHUNK] = {};
    int64_t at = c * CHUNK, len = std::min<int64_t>(n - at, CHUNK);
    for (int64_t r = 0; r < ranks; r++)
      for (int j = 0; j < k; j++) {
        bf16 value;
        std::memcpy(&value, sent + r * sent_apart + 2 * (c * k + j), 2);
        sum[places[r * apart + c * k + j]] += get(value);
      }
    if (add)
      for (int i = 0; i < len; i++) out[at + i] += sum[i];
    else
      for (int i = 0; i < len; i++) out[at + i] = sum[i] * factor;
  }
}

}  // namespace

extern "C" {

// Whether all of x + rest lie below ``limit`` in magnitude.
int codec_finite(const void* x, const float* rest, int64_t n, int32_t limit, int half,
                 int threads) {
  int32_t largest = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : largest)
  for (int64_t piece = 0; piece < threads; piece++) {
    int64_t from = n * piece / threads, end = n * (piece + 1) / threads;
    BOTH(for (int64_t i = from; i < end; i++) largest =
             std::max(largest, magnitude(get(((const T*)x)[i]) + (rest ? rest[i] : 0.f))))
  }
  return largest < limit;
}

void codec_encode(const void* x, const float* rest, float* kept, uint8_t* codes, uint16_t* scales,
                  int64_t n, int64_t block, int bits, const Rule* rule, int half, int threads) {
  with_side(block, [=](auto side) {
    auto run = [=](auto* numbers) {
      if (bits == 8) encode<8>(numbers, rest, kept, codes, scales, n, *rule, threads, side);
      else encode<4>(numbers, rest, kept, codes, scales, n, *rule, threads, side);
    };
    BOTH(run((const T*)x))
  });
}

void codec_decode(const uint8_t* codes, int64_t apart, const uint8_t* scales, int64_t scales_apart,
                  int64_t ranks, int64_t n, int64_t block, int bits, float factor, int add,
                  float* out, int threads) {
  with_side(block, [=](auto side) {
    auto run = [=](auto decoded) {
      decoded(codes, apart, scales, scales_apart, ranks, n, factor, out, threads, side);
    };
    using S = decltype(side);
    if (bits == 8) add ? run(decode<8, true, S>) : run(decode<8, false, S>);
    else add ? run(decode<4, true, S>) : run(decode<4, false, S>);
  });
}

void codec_topk_encode(const void* x, const float* rest, float* kept, uint8_t* places,
                       uint16_t* sent, int64_t n, int k, int half, int threads) {
  BOTH(topk_encode((const T*)x, rest, kept, places, sent, n, k, threads))
}

void codec_topk_decode(const uint8_t* places, int64_t apart, const uint8_t* sent,
                       int64_t sent_apart, int64_t ranks, int64_t n, int k, float factor, int add,
                       float* out, int threads) {
  topk_decode(places, apart, sent, sent_apart, ranks, n, k, factor, add, out, threads);
}
}
