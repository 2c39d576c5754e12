// Weights that drift from what all ranks have in common, the anchor: how far they have moved, encoded,
// and the way back, in one pass over each number. The bits are those of ``comm/local_sgd.py``: a share
// times a movement is rounded before it is added, which a compiler that fuses the two would not do, so
// the products lie in memory in between.
#include "codec_blocks.h"

namespace {

// Weights of several parameters one after the other; ``starts`` has one more, where the last ends.
struct Stretch {
  float* const* at;
  const int64_t* starts;
  int64_t count;
};

// ``does(weights, offset, numbers)`` for each parameter's part of ``len`` numbers from ``first`` on.
template <class Does>
inline void walk(const Stretch& stretch, int64_t first, int64_t len, Does does) {
  const int64_t* end = stretch.starts + stretch.count + 1;
  int64_t k = std::upper_bound(stretch.starts, end, first) - stretch.starts - 1;
  for (int64_t done = 0; done < len; k++) {
    int64_t from = first + done - stretch.starts[k];
    int64_t n = std::min(len - done, stretch.starts[k + 1] - first - done);
    if (n > 0) does(stretch.at[k] + from, done, n);
    done += n;
  }
}

template <int BITS, class Side>
int moved(const Stretch& stretch, const float* anchor, uint8_t* codes, uint16_t* scales, int64_t n,
          const Rule& rule, int threads, Side side) {
  int64_t blocks = (n + side - 1) / side, bytes = side * BITS / 8;
  int wrong = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : wrong)
  for (int64_t b = 0; b < blocks; b++) {
    alignas(64) float v[LARGEST_BLOCK];
    int64_t first = b * side, len = std::min<int64_t>(n - first, side);
    walk(stretch, first, len, [&](const float* w, int64_t to, int64_t count) {
      const float* a = anchor + first + to;
      float* out = v + to;
      for (int64_t i = 0; i < count; i++) out[i] = w[i] - a[i];
    });
    encode_block<BITS>(v, nullptr, nullptr, codes + b * bytes, scales + b, first, len, rule, side);
    wrong |= scales[b] == NOT_A_NUMBER;
  }
  return !wrong;
}

template <int BITS, class Side>
void taken(const Stretch& stretch, float* anchor, const uint8_t* codes, int64_t apart,
           const uint8_t* scales, const float* shares, int64_t ranks, int64_t own, int64_t n,
           int threads, Side side) {
  int64_t blocks = (n + side - 1) / side, bytes = side * BITS / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    alignas(64) float common[LARGEST_BLOCK], mine[LARGEST_BLOCK], its[LARGEST_BLOCK];
    for (int i = 0; i < side; i++) common[i] = 0;
    for (int64_t r = 0; r < ranks; r++) {
      uint16_t bits;
      std::memcpy(&bits, scales + r * apart + 2 * b, 2);
      float scale = from_bits(int32_t(uint32_t(bits) << 16));
      values<BITS, false>(codes + r * apart + b * bytes, scale, its, side);
      if (r == own) std::memcpy(mine, its, side * sizeof(float));
      for (int i = 0; i < side; i++) its[i] *= shares[r];
      asm volatile("" ::"r"(its) : "memory");
      for (int i = 0; i < side; i++) common[i] += its[i];
    }
    int64_t first = b * side, len = std::min<int64_t>(n - first, side);
    float* a = anchor + first;
    for (int i = 0; i < len; i++) a[i] += common[i];
    walk(stretch, first, len, [&](float* w, int64_t from, int64_t count) {
      const float *all = common + from, *own_part = mine + from;
      for (int64_t i = 0; i < count; i++) w[i] += all[i] - own_part[i];
    });
  }
}

}  // namespace

extern "C" {

// The movement of ``n`` weights as codes and scales; whether all of it is finite.
int drift_encode(float* const* at, const int64_t* starts, int64_t count, const float* anchor,
                 uint8_t* codes, uint16_t* scales, int64_t n, int64_t block, int bits,
                 const Rule* rule, int threads) {
  Stretch stretch{at, starts, count};
  int fine = 0;
  with_side(block, [&](auto side) {
    if (bits == 8) fine = moved<8>(stretch, anchor, codes, scales, n, *rule, threads, side);
    else if (bits == 1) fine = moved<1>(stretch, anchor, codes, scales, n, *rule, threads, side);
    else fine = moved<4>(stretch, anchor, codes, scales, n, *rule, threads, side);
  });
  return fine;
}

// Anchor and weights move as the messages of ``ranks``, ``apart`` bytes apart, say by their shares.
void drift_take(float* const* at, const int64_t* starts, int64_t count, float* anchor,
                const uint8_t* codes, int64_t apart, const uint8_t* scales, const float* shares,
                int64_t ranks, int64_t own, int64_t n, int64_t block, int bits, int threads) {
  Stretch stretch{at, starts, count};
  with_side(block, [&](auto side) {
    auto run = [&](auto does) {
      does(stretch, anchor, codes, apart, scales, shares, ranks, own, n, threads, side);
    };
    using S = decltype(side);
    if (bits == 8) run(taken<8, S>);
    else if (bits == 1) run(taken<1, S>);
    else run(taken<4, S>);
  });
}
}
