// What travels between ranks, made small and large again: numbers in blocks as int8, int4 or signs
// with one bf16 scale each (``codec_blocks.h``), and the k largest of each chunk of 256.
#include "codec_blocks.h"

namespace {

constexpr int CHUNK = 256;

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
      else if (bits == 1) encode<1>(numbers, rest, kept, codes, scales, n, *rule, threads, side);
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
    else if (bits == 1) add ? run(decode<1, true, S>) : run(decode<1, false, S>);
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
