// Causal attention inside each document of a packed row, forward and backward, on AMX.
//
// The scores of 32 queries against all keys before them are formed, turned into weights and used
// while they lie in the cache; no matrix of scores is kept. Backward forms them again from the
// saved logarithm of each row's sum (Dao et al., FlashAttention, arXiv:2205.14135). One task is one
// document and one key-value head; queries of all heads that share it are its work.
//
// forward   for each 32 queries: S = Q K'; P = exp(scale S - max); O = P V / sum
// backward  for each 128 keys, each 128 queries from there on, all transposed, so that weights and
//           their gradients come out as factors of the next products without another move:
//           S' = K Q'; P' = exp(scale S' - lse); dP' = V dO'; dS' = scale P' (dP' - D)
//           dV += P' dO; dK += dS' Q; dQ' += K' dS'        with D = rowsum(dO O)
#include <algorithm>
#include <cmath>
#include <utility>

#include "amx.h"
#include "heads.h"

namespace {

constexpr int64_t BLOCK = 128;             // keys and queries of one round of the backward pass
constexpr int64_t LINE = BLOCK / DEPTH;    // tiles of k in such a round

// exp of 16 numbers that are at most a few tens: 2 to the whole part by scaling, the rest by a
// polynomial of degree 4 with a relative error of 3e-6, a thousandth of bf16's. Below e^-87 it is 0:
// a processor needs a hundred times as long for a result below the normal numbers.
inline __m512 exponential(__m512 x) {
  // not "greater": a NaN stays one
  __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_NLT_UQ);
  __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                      _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.69314718f), x);
  __m512 p = _mm512_set1_ps(.04159136f);
  for (float c : {.16790625f, .50002216f, .99996377f, 1.f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_maskz_scalef_ps(normal, p, whole);
}

inline __m512i two(__m512 first, __m512 second) {  // 32 bf16 in a row
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// All of a head's rows as lines of tiles, one of the four layouts of amx.h.
template <void (*Layout)(const bf16*, int64_t, int64_t, int64_t, bf16*)>
void by_rows(const bf16* from, int64_t stride, int64_t rows, int64_t width, bf16* to) {
  int64_t steps = tiles(width, DEPTH);
  for (int64_t i = 0; i < tiles(rows, 32) * 32; i += TILE)
    for (int64_t j = 0; j < width; j += DEPTH)
      Layout(from + i * stride + j, stride, rows - i, width - j,
             to + (i / TILE * steps + j / DEPTH) * WORDS);
}
template <void (*Layout)(const bf16*, int64_t, int64_t, int64_t, bf16*, int64_t)>
void by_columns(const bf16* from, int64_t stride, int64_t rows, int64_t width, bf16* to) {
  int64_t line = tiles(rows, DEPTH) * WORDS;
  for (int64_t i = 0; i < rows; i += DEPTH)
    for (int64_t j = 0; j < width; j += 32)
      Layout(from + i * stride + j, stride, rows - i, width - j,
             to + j / TILE * line + i / DEPTH * WORDS, line);
}

inline int64_t room(int64_t rows, int64_t width) {  // bf16 that the tiles of a head take
  return tiles(rows, 32) * 32 * tiles(width, 32) * 32;
}

// One row of scores to weights in A's layout; returns the sum, ``most`` the largest score.
float weigh(const float* scores, int64_t valid, int64_t chunks, float scale, bf16* to, float* most) {
  __m512 top = _mm512_set1_ps(-3e38f);
  for (int64_t i = 0; i < valid; i += 16)
    top = _mm512_mask_max_ps(top, upto(valid - i), top, _mm512_loadu_ps(scores + i));
  *most = _mm512_reduce_max_ps(top) * scale;
  __m512 sum = _mm512_setzero_ps(), by = _mm512_set1_ps(scale), less = _mm512_set1_ps(*most);
  for (int64_t c = 0; c < chunks; c++) {
    __m512 e[2];
    for (int64_t h = 0; h < 2; h++) {
      int64_t i = c * 32 + h * 16;
      __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), by, less);
      e[h] = _mm512_maskz_mov_ps(upto(valid - i), exponential(x));
      sum = _mm512_add_ps(sum, e[h]);
    }
    _mm512_store_si512(to + c * WORDS, two(e[0], e[1]));
  }
  return _mm512_reduce_add_ps(sum);
}

void forward(const Shape& s, Heads<bf16> q, Heads<bf16> k, Heads<bf16> v, bf16* out, float* lse, int64_t start,
             int64_t length, int64_t group) {
  thread_local Scratch keys_memory, values_memory, work_memory, score_memory;
  int64_t depth = tiles(s.dk, DEPTH), chunks = tiles(length, 32), each = s.heads / s.groups;
  bf16* keys = keys_memory.get<bf16>(room(length, s.dk));
  bf16* values = values_memory.get<bf16>(room(length, s.dv));
  bf16* query = work_memory.get<bf16>(2 * (depth + chunks) * WORDS);
  bf16* weights = query + 2 * depth * WORDS;
  int64_t width = chunks * 32 + 16;  // not a power of two, so that rows don't share cache sets
  float* scores = score_memory.get<float>(32 * width + 1024);
  float* sums = scores + 32 * width;
  by_rows<b_from_columns>(k.of(start, group), k.token, length, s.dk, keys);
  by_columns<b_from_rows>(v.of(start, group), v.token, length, s.dv, values);
  for (int64_t head = group * each; head < (group + 1) * each; head++)
    for (int64_t at = 0; at < length; at += 32) {
      int64_t rows = std::min<int64_t>(32, length - at), blocks = at / 32 + 1;
      by_rows<a_from_rows>(q.of(start + at, head), q.token, rows, s.dk, query);
      for (int64_t j = 0; j < blocks; j++) {
        zero_c();
        multiply(query, depth * WORDS, keys + j * 2 * depth * WORDS, depth * WORDS, depth);
        store_c(scores + j * 32, 16 * width, 16, width * 4);
      }
      float inverse[32];
      for (int64_t r = 0; r < rows; r++) {
        float most;
        float sum = weigh(scores + r * width, at + r + 1, blocks, s.scale,
                          weights + r / TILE * blocks * WORDS + r % TILE * DEPTH, &most);
        inverse[r] = 1 / sum;
        lse[head * s.tokens + start + at + r] = most + std::log(sum);
      }
      for (int64_t n = 0; n < s.dv; n += 32) {
        zero_c();
        multiply(weights, blocks * WORDS, values + n / TILE * chunks * WORDS, chunks * WORDS,
                 blocks);
        store_c(sums, 512, 256, 64);
        bf16* to = out + ((start + at) * s.heads + head) * s.dv + n;
        for (int64_t r = 0; r < rows; r++, to += s.heads * s.dv) {
          const float* from = sums + r / TILE * 512 + r % TILE * TILE;
          __m512 by = _mm512_set1_ps(inverse[r]);
          __m512 first = _mm512_mul_ps(_mm512_load_ps(from), by);
          __m512 second = _mm512_mul_ps(_mm512_load_ps(from + 256), by);
          _mm512_mask_storeu_epi16(to, upto32(s.dv - n), two(first, second));
        }
      }
    }
}

// What one head's backward pass works on: tiles of its factors, sums of its gradients.
struct Work {
  bf16 *k_rows, *v_rows, *k_columns;                     // A: K, V, K'
  bf16 *q_right, *o_right, *q_below, *o_below;           // B: Q', dO', Q, dO
  bf16 *weights, *slopes, *slopes_below;                 // A: P', dS'; B: dS'
  float *dq, *dk, *dv, *lse, *dot;
};

Work workspace(const Shape& s, int64_t length) {
  thread_local Scratch memory;
  int64_t k = room(length, s.dk), v = room(length, s.dv), rows = tiles(length, BLOCK) * BLOCK;
  int64_t block = BLOCK * BLOCK;
  char* at = memory.get<char>((4 * k + 3 * v + 3 * block) * 2 + (2 * k + v + 2 * rows) * 4);
  auto take = [&](int64_t count) { return std::exchange(at, at + count * 2); };
  auto half = [&](int64_t count) { return reinterpret_cast<bf16*>(take(count)); };
  auto full = [&](int64_t count) { return reinterpret_cast<float*>(take(2 * count)); };
  Work w;
  w.k_rows = half(k), w.v_rows = half(v), w.k_columns = half(k);
  w.q_right = half(k), w.o_right = half(v), w.q_below = half(k), w.o_below = half(v);
  w.weights = half(block), w.slopes = half(block), w.slopes_below = half(block);
  w.dq = full(k), w.dk = full(k), w.dv = full(v), w.lse = full(rows), w.dot = full(rows);
  return w;
}

// Weights and their gradients of 32 keys by 32 queries, from the two products' sums.
void slope(const float* scores, const float* grads, const float* lse, const float* dot, float scale,
           bool diagonal, bf16* weights, bf16* slopes, bf16* below) {
  __m512 by = _mm512_set1_ps(scale);
  __m512i queries = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t r = 0; r < 32; r += 2) {
    __m512 p[2][2], d[2][2];  // row, half
    for (int64_t i = 0; i < 2; i++)
      for (int64_t h = 0; h < 2; h++) {
        int64_t at = (r + i) / TILE * 512 + h * 256 + (r + i) % TILE * TILE;
        __m512 x = _mm512_fmsub_ps(_mm512_load_ps(scores + at), by, _mm512_loadu_ps(lse + h * 16));
        p[i][h] = exponential(x);
        if (diagonal)  // a query sees the keys up to its own place
          p[i][h] = _mm512_maskz_mov_ps(
              _mm512_cmpge_epi32_mask(queries, _mm512_set1_epi32(r + i - h * 16)), p[i][h]);
        __m512 more = _mm512_sub_ps(_mm512_load_ps(grads + at), _mm512_loadu_ps(dot + h * 16));
        d[i][h] = _mm512_mul_ps(_mm512_mul_ps(p[i][h], by), more);
      }
    for (int64_t i = 0; i < 2; i++) {
      int64_t at = (r + i) / TILE * LINE * WORDS + (r + i) % TILE * DEPTH;
      _mm512_store_si512(weights + at, two(p[i][0], p[i][1]));
      _mm512_store_si512(slopes + at, two(d[i][0], d[i][1]));
    }
    for (int64_t h = 0; h < 2; h++) {
      __m512i low = _mm512_cvtepu16_epi32(narrow(d[0][h]));
      __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(d[1][h])), 16);
      _mm512_store_si512(below + h * LINE * WORDS + r / 2 * DEPTH, _mm512_or_si512(low, high));
    }
  }
}

// Keys from 32 * kb and queries from 32 * qb, up to four blocks of 32 each; blocks in units of 32.
void round_of(const Shape& s, const Work& w, int64_t length, int64_t kb, int64_t qb) {
  int64_t chunks = tiles(length, 32), in = tiles(s.dk, 32), out = tiles(s.dv, 32);
  int64_t ks = std::min(LINE, chunks - kb), qs = std::min(LINE, chunks - qb);
  alignas(64) float scores[1024], grads[1024];
  for (int64_t k = 0; k < ks; k++)
    for (int64_t q = kb == qb ? k : 0; q < qs; q++) {
      zero_c();
      multiply(w.k_rows + (kb + k) * 2 * in * WORDS, in * WORDS,
               w.q_right + (qb + q) * 2 * in * WORDS, in * WORDS, in);
      store_c(scores, 512, 256, 64);
      zero_c();
      multiply(w.v_rows + (kb + k) * 2 * out * WORDS, out * WORDS,
               w.o_right + (qb + q) * 2 * out * WORDS, out * WORDS, out);
      store_c(grads, 512, 256, 64);
      slope(scores, grads, w.lse + (qb + q) * 32, w.dot + (qb + q) * 32, s.scale,
            kb + k == qb + q, w.weights + (k * 2 * LINE + q) * WORDS,
            w.slopes + (k * 2 * LINE + q) * WORDS, w.slopes_below + (q * 2 * LINE + k) * WORDS);
    }
  auto add = [&](const bf16* a, int64_t a_next, const bf16* b, int64_t b_next, int64_t steps,
                 float* c) {
    load_c(c, 512, 256, 64);
    multiply(a, a_next * WORDS, b, b_next * WORDS, steps);
    store_c(c, 512, 256, 64);
  };
  for (int64_t k = 0; k < ks; k++) {
    int64_t q = kb == qb ? k : 0, from = k * 2 * LINE + q;
    for (int64_t n = 0; n < out; n++)
      add(w.weights + from * WORDS, LINE, w.o_below + (n * 2 * chunks + qb + q) * WORDS, chunks,
          qs - q, w.dv + ((kb + k) * out + n) * 1024);
    for (int64_t n = 0; n < in; n++)
      add(w.slopes + from * WORDS, LINE, w.q_below + (n * 2 * chunks + qb + q) * WORDS, chunks,
          qs - q, w.dk + ((kb + k) * in + n) * 1024);
  }
  for (int64_t q = 0; q < qs; q++)
    for (int64_t n = 0; n < in; n++)
      add(w.k_columns + (n * 2 * chunks + kb) * WORDS, chunks,
          w.slopes_below + q * 2 * LINE * WORDS, LINE, kb == qb ? std::min(q + 1, ks) : ks,
          w.dq + ((qb + q) * in + n) * 1024);
}

// Blocks of 32 x 32 sums to bf16 rows; ``turned``: the blocks hold the transposed matrix.
void write(const float* sums, bool turned, int64_t rows, int64_t width, bf16* out, int64_t stride) {
  int64_t across = tiles(width, 32);
  for (int64_t i = 0; i < rows; i += TILE)
    for (int64_t j = 0; j < width; j += TILE) {
      const float* block = sums + (i / 32 * across + j / 32) * 1024;
      int64_t down = i / TILE % 2, right = j / TILE % 2;
      const float* tile = block + (turned ? right * 512 + down * 256 : down * 512 + right * 256);
      __m512i r[16];
      for (int l = 0; l < 16; l++) r[l] = _mm512_load_si512(tile + l * TILE);
      if (turned) transpose(r);
      for (int64_t l = 0; l < 16 && i + l < rows; l++)
        _mm256_mask_storeu_epi16(out + (i + l) * stride + j, upto(width - j),
                                 narrow(_mm512_castsi512_ps(r[l])));
    }
}

// ``dot`` of the output and its gradient for each query, in float.
float inner(const bf16* x, const bf16* y, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    __mmask16 mask = upto(width - i);
    sum = _mm512_fmadd_ps(widen(_mm256_maskz_loadu_epi16(mask, x + i)),
                          widen(_mm256_maskz_loadu_epi16(mask, y + i)), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

struct Gradients {
  bf16 *q, *k, *v;  // (tokens, heads or groups, dk or dv)
};

void backward(const Shape& s, Heads<bf16> q, Heads<bf16> k, Heads<bf16> v, Heads<bf16> o, Heads<bf16> grad, const float* lse,
              Gradients to, int64_t start, int64_t length, int64_t group) {
  Work w = workspace(s, length);
  int64_t chunks = tiles(length, 32), each = s.heads / s.groups;
  by_rows<a_from_rows>(k.of(start, group), k.token, length, s.dk, w.k_rows);
  by_rows<a_from_rows>(v.of(start, group), v.token, length, s.dv, w.v_rows);
  by_columns<a_from_columns>(k.of(start, group), k.token, length, s.dk, w.k_columns);
  std::fill_n(w.dk, room(length, s.dk), 0.f);
  std::fill_n(w.dv, room(length, s.dv), 0.f);
  for (int64_t head = group * each; head < (group + 1) * each; head++) {
    by_rows<b_from_columns>(q.of(start, head), q.token, length, s.dk, w.q_right);
    by_columns<b_from_rows>(q.of(start, head), q.token, length, s.dk, w.q_below);
    by_rows<b_from_columns>(grad.of(start, head), grad.token, length, s.dv, w.o_right);
    by_columns<b_from_rows>(grad.of(start, head), grad.token, length, s.dv, w.o_below);
    for (int64_t t = 0; t < chunks * 32; t++) {
      bool there = t < length;
      w.lse[t] = there ? lse[head * s.tokens + start + t] : INFINITY;
      w.dot[t] = there ? inner(o.of(start + t, head), grad.of(start + t, head), s.dv) : 0;
    }
    std::fill_n(w.dq, room(length, s.dk), 0.f);
    for (int64_t kb = 0; kb < chunks; kb += LINE)
      for (int64_t qb = kb; qb < chunks; qb += LINE) round_of(s, w, length, kb, qb);
    write(w.dq, true, length, s.dk, to.q + (start * s.heads + head) * s.dk, s.heads * s.dk);
  }
  write(w.dk, false, length, s.dk, to.k + (start * s.groups + group) * s.dk, s.groups * s.dk);
  write(w.dv, false, length, s.dv, to.v + (start * s.groups + group) * s.dv, s.groups * s.dv);
}

template <class Task>
void each_document(const Shape& s, const int64_t* starts, int64_t documents, int threads,
                   Task task) {
#pragma omp parallel num_threads(threads)
  {
    Registers registers;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < documents * s.groups; i++) {
      int64_t d = i / s.groups;
      if (starts[d + 1] > starts[d]) task(starts[d], starts[d + 1] - starts[d], i % s.groups);
    }
  }
}

}  // namespace

extern "C" {

// Strides in elements, tokens and heads; ``shape``: tokens, heads, groups, dk, dv, documents.
void amx_attention_forward(const bf16* q, const bf16* k, const bf16* v, const int64_t* strides,
                           const int64_t* shape, float scale, const int64_t* starts, bf16* out,
                           float* lse, int threads) {
  Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], scale};
  Heads<bf16> queries{q, strides[0], strides[1]}, keys{k, strides[2], strides[3]};
  Heads<bf16> values{v, strides[4], strides[5]};
  each_document(s, starts, shape[5], threads, [&](int64_t start, int64_t length, int64_t group) {
    forward(s, queries, keys, values, out, lse, start, length, group);
  });
}

void amx_attention_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* out,
                            const bf16* grad, const int64_t* strides, const int64_t* shape,
                            float scale, const int64_t* starts, const float* lse, bf16* dq,
                            bf16* dk, bf16* dv, int threads) {
  Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], scale};
  Heads<bf16> queries{q, strides[0], strides[1]}, keys{k, strides[2], strides[3]};
  Heads<bf16> values{v, strides[4], strides[5]}, grads{grad, strides[6], strides[7]};
  Heads<bf16> output{out, s.heads * s.dv, s.dv};
  each_document(s, starts, shape[5], threads, [&](int64_t start, int64_t length, int64_t group) {
    backward(s, queries, keys, values, output, grads, lse, {dq, dk, dv}, start, length, group);
  });
}
}
