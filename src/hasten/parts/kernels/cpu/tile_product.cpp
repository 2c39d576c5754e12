// Matrix products of bf16 with float sums on AMX, for any shape, with nothing kept per shape.
//
// C (m, n) = A (m, k) B (k, n), each of A and B given by rows or transposed. The weight gradient of
// a linear layer is the case that libraries are slow in: both factors have k as their rows.
//
//   (1) C is cut into slabs, one task each, so that what a slab needs stays in the second cache
//   (2) for each chunk of k: B's columns of the slab are laid out as tiles; of A 32 rows at a time,
//       or all rows of the slab where A is turned
//   (3) 2 x 2 tiles of C at a time run over the chunk; sums go on from chunk to chunk in float
//   (4) after the last chunk they are rounded once and written, added to what is there if wanted
#include <algorithm>
#include <vector>

#include "amx.h"

namespace {

constexpr int64_t CACHE = 1500000;  // bytes of the second cache that a slab may fill

struct Matrix {
  const bf16* at;
  int64_t stride;
  bool transposed;
};

struct Slab {
  int64_t m, rows, n, columns;
};

// Tiles of one factor for a slab and a chunk of k: lines of ``steps`` tiles, an even number of lines.
// ``contiguous``: the matrix has k within its rows; ``width`` rows of A or columns of B.
template <bool A>
void lay_out(const Matrix& x, bool contiguous, int64_t at, int64_t width, int64_t k, int64_t depth,
             bf16* to) {
  int64_t steps = tiles(depth, DEPTH), line = steps * WORDS;
  if (contiguous) {
    for (int64_t i = 0; i < tiles(width, 32) * 32; i += TILE)
      for (int64_t j = 0; j < depth; j += DEPTH) {
        const bf16* from = x.at + (at + i) * x.stride + k + j;
        bf16* tile = to + i / TILE * line + j / DEPTH * WORDS;
        if (A) a_from_rows(from, x.stride, width - i, depth - j, tile);
        else b_from_columns(from, x.stride, width - i, depth - j, tile);
      }
    return;
  }
  for (int64_t j = 0; j < depth; j += DEPTH)
    for (int64_t i = 0; i < width; i += 32) {
      const bf16* from = x.at + (k + j) * x.stride + at + i;
      bf16* tile = to + i / TILE * line + j / DEPTH * WORDS;
      if (A) a_from_columns(from, x.stride, depth - j, width - i, tile, line);
      else b_from_rows(from, x.stride, depth - j, width - i, tile, line);
    }
}

// 32 x 32 sums to the output, of which ``rows`` x ``columns`` exist.
template <class Out>
void write(const float* sums, Out* out, int64_t stride, int64_t rows, int64_t columns, bool add) {
  __mmask16 left = upto(columns), right = upto(columns - TILE);
  for (int64_t r = 0; r < rows && r < 32; r++) {
    const float* at = sums + r / TILE * 512 + r % TILE * TILE;
    __m512 v = _mm512_load_ps(at), w = _mm512_load_ps(at + 256);
    Out* to = out + r * stride;
    if constexpr (sizeof(Out) == 4) {
      if (add) {
        v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(left, to));
        w = _mm512_add_ps(w, _mm512_maskz_loadu_ps(right, to + TILE));
      }
      _mm512_mask_storeu_ps(to, left, v);
      _mm512_mask_storeu_ps(to + TILE, right, w);
    } else {
      if (add) {
        v = _mm512_add_ps(v, widen(_mm256_maskz_loadu_epi16(left, to)));
        w = _mm512_add_ps(w, widen(_mm256_maskz_loadu_epi16(right, to + TILE)));
      }
      _mm512_mask_storeu_epi16(to, upto32(columns), (__m512i)_mm512_cvtne2ps_pbh(w, v));
    }
  }
}

// Ask for the lines that will be written, so that they are there when the sums are.
template <class Out>
void expect(const Out* out, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows && r < 32; r++) __builtin_prefetch(out + r * stride, 1);
}

// Ask for a part of the next 32 rows of A, so that they are near when they are laid out.
inline void expect_rows(const Matrix& a, int64_t row, int64_t k, int64_t steps, int64_t part,
                        int64_t parts) {
  int64_t lines = steps * 32, each = tiles(lines, parts);
  for (int64_t l = part * each; l < (part + 1) * each && l < lines; l++)
    __builtin_prefetch(a.at + (row + l % 32) * a.stride + k + l / 32 * DEPTH, 0, 2);
}

template <class Out>
void slab(const Matrix& a, const Matrix& b, const Slab& s, int64_t k, int64_t chunk, Out* out,
          int64_t stride, bool add) {
  thread_local Scratch a_memory, b_memory, c_memory;
  int64_t blocks_m = tiles(s.rows, 32), blocks_n = tiles(s.columns, 32);
  int64_t most = tiles(chunk, DEPTH);
  bf16* at = a_memory.get<bf16>((a.transposed ? blocks_m : 1) * 2 * most * WORDS);
  bf16* bt = b_memory.get<bf16>(blocks_n * 2 * most * WORDS);
  float* ct = c_memory.get<float>(chunk < k ? blocks_m * blocks_n * 1024 : 1024);
  for (int64_t from = 0; from < k; from += chunk) {
    int64_t depth = std::min(chunk, k - from), steps = tiles(depth, DEPTH);
    auto block = [&](const bf16* strip, int64_t i, int64_t j) {
      bool last = from + chunk >= k;
      float* c = chunk < k ? ct + (j * blocks_m + i) * 1024 : ct;
      Out* to = out + (s.m + i * 32) * stride + s.n + j * 32;
      if (last) expect(to, stride, s.rows - i * 32);
      if (from) load_c(c, 512, 256, 64);
      else zero_c();
      multiply(strip, steps * WORDS, bt + j * 2 * steps * WORDS, steps * WORDS, steps);
      store_c(c, 512, 256, 64);
      if (last) write(c, to, stride, s.rows - i * 32, s.columns - j * 32, add);
    };
    lay_out<false>(b, b.transposed, s.n, s.columns, from, depth, bt);
    if (a.transposed) {
      lay_out<true>(a, false, s.m, s.rows, from, depth, at);
      for (int64_t j = 0; j < blocks_n; j++)
        for (int64_t i = 0; i < blocks_m; i++) block(at + i * 2 * steps * WORDS, i, j);
      continue;
    }
    for (int64_t i = 0; i < blocks_m; i++) {
      int64_t row = s.m + i * 32;
      lay_out<true>(a, true, row, std::min<int64_t>(32, s.rows - i * 32), from, depth, at);
      for (int64_t j = 0; j < blocks_n; j++) {
        if (s.rows - i * 32 >= 64) expect_rows(a, row + 32, from, steps, j, blocks_n);
        block(at, i, j);
      }
    }
  }
}

struct Cut {
  int64_t rows, columns, chunk;  // of a slab
};

// Slabs whose tiles and sums lie in the second cache, cut so that the thread with the most to do
// has the least: products, sums put aside between chunks, and laying out tiles, which costs more
// where a matrix is turned. In cycles, measured.
Cut cut(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t k, int threads) {
  double lay_a = a.transposed ? .6 : .2, lay_b = b.transposed ? .8 : .4;  // per number
  double best = 0;
  Cut found{m, n, k};  // of nothing: zeros
  if (!k) return found;
  // A turned A is laid out whole: small chunks keep it near.
  for (int64_t chunk : {int64_t(256), int64_t(384), int64_t(1024), k}) {
    if (chunk > k || (a.transposed && chunk > 384)) continue;
    bool aside = chunk < k;
    for (int64_t across = 1; across <= tiles(n, 32); across++) {
      int64_t columns = tiles(tiles(n, across), 32) * 32;
      if (columns * chunk * 2 > CACHE) continue;
      for (int64_t down = 1; down <= tiles(m, 32); down++) {
        int64_t rows = tiles(tiles(m, down), 32) * 32;
        int64_t numbers = (columns + (a.transposed ? rows : 32)) * chunk;
        if (numbers * 2 + aside * rows * columns * 4 > CACHE) continue;
        int64_t rounds = tiles(tiles(m, rows) * tiles(n, columns), threads);
        double cost = rounds * (rows * columns * (.0022 * k + .2 + aside * .2 * tiles(k, chunk)) +
                                k * (rows * lay_a + columns * lay_b));
        if (best == 0 || cost < best) best = cost, found = {rows, columns, chunk};
        if (rows == 32 || rounds > 64) break;
      }
      if (columns == 32) break;
    }
  }
  return found;
}

struct Group {  // one of several products that share their formats and strides
  Matrix a, b;
  int64_t out, m, n, k;  // where its result begins
};

template <class Out>
void products(const std::vector<Group>& groups, Out* out, int64_t stride, bool add, int threads) {
  struct Task {
    const Group* group;
    Slab slab;
    int64_t chunk;
  };
  std::vector<Task> tasks;
  for (const Group& g : groups) {
    Cut c = cut(g.a, g.b, g.m, g.n, g.k, groups.size() > 1 ? 1 : threads);
    for (int64_t j = 0; j < g.n; j += c.columns)
      for (int64_t i = 0; i < g.m; i += c.rows)
        tasks.push_back({&g, {i, std::min(c.rows, g.m - i), j, std::min(c.columns, g.n - j)},
                         c.chunk});
  }
#pragma omp parallel num_threads(threads)
  {
    Registers registers;
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tasks.size(); t++) {
      const Group& g = *tasks[t].group;
      const Slab& s = tasks[t].slab;
      if (g.k)
        slab(g.a, g.b, s, g.k, tasks[t].chunk, out + g.out, stride, add);
      else if (!add)
        for (int64_t i = 0; i < s.rows; i++)
          std::memset(out + g.out + (s.m + i) * stride + s.n, 0, s.columns * sizeof(Out));
    }
  }
}

}  // namespace

extern "C" {

int amx_ready() { return amx_permitted(); }

// ``kind``: 1 A is transposed, 2 B is transposed, 4 the output is float, 8 it is added to.
// ``groups`` (count, 6): where A, B and the output of each begin, in numbers; its m, n and k.
void amx_gemm(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, void* out,
              int64_t out_stride, const int64_t* groups, int64_t count, int kind, int threads) {
  std::vector<Group> all;
  for (const int64_t* g = groups; g < groups + 6 * count; g += 6)
    if (g[3] && g[4])
      all.push_back({{a + g[0], a_stride, (kind & 1) != 0}, {b + g[1], b_stride, (kind & 2) != 0},
                     g[2], g[3], g[4], g[5]});
  if (kind & 4)
    products(all, static_cast<float*>(out), out_stride, kind & 8, threads);
  else
    products(all, static_cast<bf16*>(out), out_stride, kind & 8, threads);
}
}
