// Causal attention inside each document of a packed row, forward and backward, on any processor.
//
// The scores of a block of queries against all keys before them are formed, turned into weights and
// used while they lie in the cache; no matrix of scores is kept. Backward forms them again from the
// saved logarithm of each row's sum (Dao et al., FlashAttention, arXiv:2205.14135). One task is one
// document and one key-value head; queries of all heads that share it are its work. A document may
// have more keys than queries: its queries are then those of its last tokens.
//
// forward   for each block of queries: S = Q K'; P = exp(scale S - max); O = P V / sum
// backward  for each block of queries, each block of keys up to its end:
//           S = Q K'; P = exp(scale S - lse); dP = dO V'; dS = scale P (dP - D)
//           dV += P' dO; dK += dS' Q; dQ += dS K        with D = rowsum(dO O)
#include <numeric>
#include <vector>

#include "heads.h"
#include "unit.h"

namespace {

constexpr int64_t QUERIES = 96, KEYS = 192;  // of a block; whole pairs, whole rows of registers
constexpr int WHOLE = 16;                    // scores that are computed together
typedef Lanes<WHOLE>::Vec Scores;

template <class Unit>
constexpr int64_t COLUMNS = Unit::VECTORS * Unit::LANES;
template <class Unit>
int64_t words_of(int64_t depth) {
  return (depth + Unit::EACH - 1) / Unit::EACH;
}
template <class Unit>
int64_t room(int64_t columns, int64_t depth) {  // words of all panels of a factor
  return ceil_to(columns, COLUMNS<Unit>) * words_of<Unit>(depth);
}

// All of a head's rows as panels: ``rows`` columns over its width, or its width over the rows.
template <class Unit, class T>
void panels(Matrix<T> b, int64_t columns, int64_t depth, typename Unit::Word* to) {
  constexpr int64_t C = COLUMNS<Unit>;
  for (int64_t j = 0; j < columns; j += C)
    panel<Unit>(b.from(j, 0), std::min(C, columns - j), depth, to + j * words_of<Unit>(depth));
}

// Sums that lie in float as A of the next product: as they are, or rounded to pairs.
template <class Unit>
Left<typename Unit::Word> again(const float* sums, int64_t row, int64_t step, int64_t rows,
                                int64_t depth, typename Unit::Word* to) {
  if constexpr (Unit::EACH == 1) return {sums, row, step, Unit::ROWS * row};
  else return left<Unit>(Matrix<float>{sums, row, step}, rows, depth, to);
}

// One row of scores to weights, zeros up to ``end``; returns the sum, ``most`` the largest score.
// Up to WHOLE - 1 numbers behind ``valid`` are written, so that no number is computed by itself.
float weigh(float* row, int64_t valid, int64_t end, float scale, float* most) {
  float top = -3e38f, sum = 0;
  std::fill(row + valid, row + ceil_to(valid, WHOLE), top);
  Scores tops = top - Scores{}, sums{};
  for (int64_t i = 0; i < valid; i += WHOLE) {
    Scores x = load<WHOLE>(row + i);
    tops = x > tops ? x : tops;
  }
  for (int l = 0; l < WHOLE; l++) top = tops[l] > top ? tops[l] : top;
  top *= scale;
  for (int64_t i = 0; i < valid; i += WHOLE) {
#pragma omp simd
    for (int64_t l = i; l < i + WHOLE; l++) row[l] = exponential(row[l] * scale - top);
    sums += load<WHOLE>(row + i);
  }
  for (int l = 0; l < WHOLE; l++) sum += sums[l];
  for (int64_t i = valid; i < end; i++) row[i] = 0;
  *most = top;
  return sum;
}

// Sums times ``by`` to the output.
template <class Unit, class T>
void round_off(const float* sums, int64_t width, T* to, float by) {
  constexpr int L = Unit::LANES;
  int64_t c = 0;
  for (; c + L <= width; c += L) store<L>(to + c, load<L>(sums + c) * by);
  for (; c < width; c++) set(to[c], sums[c] * by);
}

struct Document {
  int64_t start, length, key_start, keys, group;  // first query and key, numbers of them, key head
  int64_t ahead() const { return keys - length; }  // keys before those of the first query
};

template <class Unit, class T>
void forward(const Shape& s, Heads<T> q, Heads<T> k, Heads<T> v, T* out, float* lse, Document d) {
  typedef typename Unit::Word Word;
  constexpr int64_t C = COLUMNS<Unit>, R = Unit::ROWS, E = Unit::EACH;
  static thread_local Scratch keys_memory, values_memory, query_memory, score_memory, weight_memory;
  int64_t start = d.start, length = d.length, group = d.group;
  int64_t depth = words_of<Unit>(s.dk), each = s.heads / s.groups;
  int64_t pitch = ceil_to(d.keys, 32) + 48;  // rows don't share sets of the cache
  constexpr int64_t BLOCK = QUERIES / 2;
  Word* keys = keys_memory.get<Word>(room<Unit>(d.keys, s.dk));
  Word* values = values_memory.get<Word>(room<Unit>(s.dv, d.keys));
  Word* query = query_memory.get<Word>(left_room(BLOCK, depth));
  float* scores = score_memory.get<float>((BLOCK + R) * pitch);
  Word* weights = E == 1 ? nullptr : weight_memory.get<Word>(left_room(BLOCK, words_of<Unit>(d.keys)));
  panels<Unit>(Matrix<T>{k.of(d.key_start, group), k.token, 1}, d.keys, s.dk, keys);
  panels<Unit>(Matrix<T>{v.of(d.key_start, group), 1, v.token}, s.dv, d.keys, values);
  for (int64_t head = group * each; head < (group + 1) * each; head++)
    for (int64_t at = 0; at < length; at += BLOCK) {
      int64_t rows = std::min(BLOCK, length - at), full = ceil_to(rows, R);
      int64_t own = d.ahead() + at, seen = own + rows;  // the key of the first of these queries
      auto x = left<Unit>(Matrix<T>{q.of(start + at, head), q.token, 1}, rows, s.dk, query);
      for (int64_t j = 0; j < seen; j += C)
        for (int64_t i = std::max<int64_t>(0, j - own) / R * R; i < rows; i += R)
          multiply<Unit>(x.from(i / R), keys + j * depth, depth,
                         scores + i * pitch + j, pitch, false);
      float inverse[BLOCK];
      int64_t end = E == 1 ? seen : ceil_to(seen, E);
      for (int64_t r = 0; r < rows; r++) {
        float most, sum = weigh(scores + r * pitch, own + r + 1, end, s.scale, &most);
        inverse[r] = 1 / sum;
        lse[head * s.tokens + start + at + r] = most + std::log(sum);
      }
      auto p = again<Unit>(scores, pitch, 1, full, seen, weights);
      for (int64_t n = 0; n < s.dv; n += C)
        for (int64_t i = 0; i < rows; i += R) {
          alignas(64) float tile[R * C];
          multiply<Unit>(p.from(i / R), values + n * words_of<Unit>(d.keys),
                         words_of<Unit>(std::min(seen, own + i + R)), tile, C, false);
          for (int64_t r = 0; r < std::min(R, rows - i); r++) {
            T* to = out + ((start + at + i + r) * s.heads + head) * s.dv + n;
            round_off<Unit>(tile + r * C, std::min(C, s.dv - n), to, inverse[i + r]);
          }
        }
    }
}

template <class T>
struct Gradients {
  T *q, *k, *v;  // (tokens, heads or groups, dk or dv)
};

// dS and P of one row of a block from its two rows of products, zeros up to ``end``; as ``weigh``.
void slope(float* scores, float* grads, int64_t valid, int64_t end, float scale, float lse, float dot) {
  for (int64_t i = 0; i < valid; i += WHOLE)
#pragma omp simd
    for (int64_t l = i; l < i + WHOLE; l++) {
      float p = exponential(scores[l] * scale - lse);
      scores[l] = p;
      grads[l] = p * scale * (grads[l] - dot);
    }
  for (int64_t i = std::max<int64_t>(valid, 0); i < end; i++) scores[i] = grads[i] = 0;
}

template <class Unit, class T>
void backward(const Shape& s, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> o, Heads<T> grad,
              const float* lse, Gradients<T> to, Document d) {
  typedef typename Unit::Word Word;
  constexpr int64_t C = COLUMNS<Unit>, R = Unit::ROWS, E = Unit::EACH;
  static thread_local Scratch panel_memory, block_memory, sum_memory, left_memory;
  int64_t start = d.start, length = d.length, group = d.group;
  int64_t in = words_of<Unit>(s.dk), deep = words_of<Unit>(s.dv);
  int64_t along = words_of<Unit>(length), along_keys = words_of<Unit>(d.keys);
  int64_t each = s.heads / s.groups, wide_k = ceil_to(s.dk, C), wide_v = ceil_to(s.dv, C);
  int64_t long_k = room<Unit>(d.keys, s.dk), long_v = room<Unit>(d.keys, s.dv);
  int64_t below_k = room<Unit>(s.dk, d.keys), below_q = room<Unit>(s.dk, length);
  Word* k_right = panel_memory.get<Word>(long_k + long_v + below_k + below_q + room<Unit>(s.dv, length));
  Word *v_right = k_right + long_k, *k_below = v_right + long_v, *q_below = k_below + below_k;
  Word* o_below = q_below + below_q;
  constexpr int64_t PITCH = KEYS + 48;
  float* scores = block_memory.get<float>(2 * (QUERIES + R) * PITCH);
  float* grads = scores + (QUERIES + R) * PITCH;
  int64_t rows_k = ceil_to(d.keys, KEYS) + R;
  float* dk = sum_memory.get<float>(rows_k * (wide_k + wide_v) + (QUERIES + R) * wide_k);
  float *dv = dk + rows_k * wide_k, *dq = dv + rows_k * wide_v;
  int64_t q_room = left_room(QUERIES, in), o_room = left_room(QUERIES, deep);
  int64_t s_room = E == 1 ? 0 : left_room(QUERIES + KEYS, KEYS);
  Word* q_left = left_memory.get<Word>(q_room + o_room + 3 * s_room);
  Word *o_left = q_left + q_room, *ds_left = o_left + o_room, *ds_turned = ds_left + s_room;
  Word* p_turned = ds_turned + s_room;
  panels<Unit>(Matrix<T>{k.of(d.key_start, group), k.token, 1}, d.keys, s.dk, k_right);
  panels<Unit>(Matrix<T>{v.of(d.key_start, group), v.token, 1}, d.keys, s.dv, v_right);
  panels<Unit>(Matrix<T>{k.of(d.key_start, group), 1, k.token}, s.dk, d.keys, k_below);
  std::fill_n(dk, rows_k * (wide_k + wide_v), 0.f);
  for (int64_t head = group * each; head < (group + 1) * each; head++) {
    panels<Unit>(Matrix<T>{q.of(start, head), 1, q.token}, s.dk, length, q_below);
    panels<Unit>(Matrix<T>{grad.of(start, head), 1, grad.token}, s.dv, length, o_below);
    for (int64_t qb = 0; qb < length; qb += QUERIES) {
      int64_t rows = std::min(QUERIES, length - qb), own = d.ahead() + qb;
      auto x = left<Unit>(Matrix<T>{q.of(start + qb, head), q.token, 1}, rows, s.dk, q_left);
      auto g = left<Unit>(Matrix<T>{grad.of(start + qb, head), grad.token, 1}, rows, s.dv, o_left);
      float dot[QUERIES];
      for (int64_t r = 0; r < rows; r++) {
        const T *one = o.of(start + qb + r, head), *two = grad.of(start + qb + r, head);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < s.dv; c++) sum += get(one[c]) * get(two[c]);
        dot[r] = sum;
      }
      for (int64_t kb = 0; kb < own + rows; kb += KEYS) {
        int64_t ks = std::min(KEYS, own + rows - kb);
        for (int64_t j = 0; j < ks; j += C)
          for (int64_t i = std::max<int64_t>(0, kb + j - own) / R * R; i < rows; i += R) {
            multiply<Unit>(x.from(i / R), k_right + (kb + j) * in, in, scores + i * PITCH + j, PITCH, false);
            multiply<Unit>(g.from(i / R), v_right + (kb + j) * deep, deep, grads + i * PITCH + j, PITCH, false);
          }
        int64_t end = ceil_to(ks, R > E ? R : E);
        for (int64_t r = 0; r < rows; r++)
          slope(scores + r * PITCH, grads + r * PITCH, std::min(ks, own + r + 1 - kb), end, s.scale,
                lse[head * s.tokens + start + qb + r], dot[r]);
        auto ds = again<Unit>(grads, PITCH, 1, ceil_to(rows, R), ks, ds_left);
        auto turned = again<Unit>(grads, 1, PITCH, ceil_to(ks, R), rows, ds_turned);
        auto p = again<Unit>(scores, 1, PITCH, ceil_to(ks, R), rows, p_turned);
        for (int64_t n = 0; n < s.dk; n += C)
          for (int64_t i = 0; i < rows; i += R) {
            int64_t depth = std::min(ks, own + i + R - kb);  // keys that these rows see
            if (depth > 0)
              multiply<Unit>(ds.from(i / R), k_below + n * along_keys + kb / E * C, words_of<Unit>(depth),
                             dq + i * wide_k + n, wide_k, kb > 0);
          }
        for (int64_t i = 0; i < ks; i += R) {
          int64_t w = std::max<int64_t>(0, kb + i - own) / E;  // the first queries that see these keys
          int64_t count = words_of<Unit>(rows) - w, at = qb / E + w;
          Left<Word> one = p.from(i / R), two = turned.from(i / R);
          one.at += w * one.step, two.at += w * two.step;
          for (int64_t n = 0; n < s.dv; n += C)
            multiply<Unit>(one, o_below + n * along + at * C, count, dv + (kb + i) * wide_v + n, wide_v, true);
          for (int64_t n = 0; n < s.dk; n += C)
            multiply<Unit>(two, q_below + n * along + at * C, count, dk + (kb + i) * wide_k + n, wide_k, true);
        }
      }
      for (int64_t r = 0; r < rows; r++)
        round_off<Unit>(dq + r * wide_k, s.dk, to.q + ((start + qb + r) * s.heads + head) * s.dk, 1);
    }
  }
  for (int64_t r = 0; r < d.keys; r++) {
    round_off<Unit>(dk + r * wide_k, s.dk, to.k + ((d.key_start + r) * s.groups + group) * s.dk, 1);
    round_off<Unit>(dv + r * wide_v, s.dv, to.v + ((d.key_start + r) * s.groups + group) * s.dv, 1);
  }
}

template <class Task>
void each_document(const Shape& s, const int64_t* starts, int64_t documents, int threads, Task task) {
  const int64_t* key_starts = starts + documents + 1;
  std::vector<int64_t> order(documents);
  std::iota(order.begin(), order.end(), 0);
  auto length = [&](int64_t d) { return starts[d + 1] - starts[d]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return length(a) > length(b); });
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t i = 0; i < documents * s.groups; i++) {
    int64_t d = order[i / s.groups], keys = key_starts[d + 1] - key_starts[d];
    if (length(d)) task(Document{starts[d], length(d), key_starts[d], keys, i % s.groups});
  }
}

template <class Unit, class T>
void run_forward(const T* q, const T* k, const T* v, const int64_t* strides, const int64_t* shape,
                 float scale, const int64_t* starts, T* out, float* lse, int threads) {
  Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], scale};
  Heads<T> queries{q, strides[0], strides[1]}, keys{k, strides[2], strides[3]};
  Heads<T> values{v, strides[4], strides[5]};
  each_document(s, starts, shape[5], threads, [&](Document d) {
    forward<Unit, T>(s, queries, keys, values, out, lse, d);
  });
}

template <class Unit, class T>
void run_backward(const T* q, const T* k, const T* v, const T* out, const T* grad,
                  const int64_t* strides, const int64_t* shape, float scale, const int64_t* starts,
                  const float* lse, Gradients<T> to, int threads) {
  Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], scale};
  Heads<T> queries{q, strides[0], strides[1]}, keys{k, strides[2], strides[3]};
  Heads<T> values{v, strides[4], strides[5]}, grads{grad, strides[6], strides[7]};
  Heads<T> output{out, s.heads * s.dv, s.dv};
  each_document(s, starts, shape[5], threads, [&](Document d) {
    backward<Unit, T>(s, queries, keys, values, output, grads, lse, to, d);
  });
}

}  // namespace

// ``half``: numbers are bf16, else float; ``pairs``: bf16 is multiplied as pairs, else as float.
#define UNITS(call, ...)                                                       \
  if (!half) { typedef float T; typedef Wide Unit; call; }                     \
  else if (pairs) { typedef bf16 T; typedef Narrow Unit; call; }               \
  else { typedef bf16 T; typedef Wide Unit; call; }

extern "C" {

// Strides in elements, tokens and heads; ``shape``: tokens, heads, groups, dk, dv, documents.
// ``starts``: of each document's queries and their end, then of each document's keys and their end.
void unit_attention_forward(const void* q, const void* k, const void* v, const int64_t* strides,
                            const int64_t* shape, float scale, const int64_t* starts, void* out,
                            float* lse, int half, int pairs, int threads) {
  UNITS((run_forward<Unit, T>((const T*)q, (const T*)k, (const T*)v, strides, shape, scale, starts,
                              (T*)out, lse, threads)))
}

void unit_attention_backward(const void* q, const void* k, const void* v, const void* out,
                             const void* grad, const int64_t* strides, const int64_t* shape,
                             float scale, const int64_t* starts, const float* lse, void* dq,
                             void* dk, void* dv, int half, int pairs, int threads) {
  UNITS((run_backward<Unit, T>((const T*)q, (const T*)k, (const T*)v, (const T*)out, (const T*)grad,
                               strides, shape, scale, starts, lse,
                               Gradients<T>{(T*)dq, (T*)dk, (T*)dv}, threads)))
}
}
