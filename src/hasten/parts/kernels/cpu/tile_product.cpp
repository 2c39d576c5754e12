// Matrix products of bf16 with float sums on AMX, for any shape, with nothing kept per shape.
//
// C (m, n) = A (m, k) B (k, n), each of A and B given by rows or transposed. The weight gradient of
// a linear layer is the case that libraries are slow in: both factors have k as their rows.
//
//   (1) C is cut into slabs, one task each, so that what a slab needs stays in the second cache
//   (2) for each chunk of k: A's rows and B's columns of the slab are laid out as tiles
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
  for (int64_t r = 0; r < rows && r < 32; r++)
    for (int64_t c = 0; c < columns && c < 32; c += TILE) {
      __mmask16 mask = upto(columns - c);
      __m512 v = _mm512_load_ps(sums + (r / TILE * 2 + c / TILE) * 256 + r % TILE * TILE);
      Out* to = out + r * stride + c;
      if constexpr (sizeof(Out) == 4) {
        if (add) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, v);
      } else {
        if (add) v = _mm512_add_ps(v, widen(_mm256_maskz_loadu_epi16(mask, to)));
        _mm256_mask_storeu_epi16(to, mask, narrow(v));
      }
    }
}

// Ask for the lines that will be written, so that they are there when the sums are.
template <class Out>
void expect(const Out* out, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows && r < 32; r++) __builtin_prefetch(out + r * stride, 1);
}

template <class Out>
void slab(const Matrix& a, const Matrix& b, const Slab& s, int64_t k, int64_t chunk, Out* out,
          int64_t stride, bool add) {
  thread_local Scratch a_memory, b_memory, c_memory;
  int64_t blocks_m = tiles(s.rows, 32), blocks_n = tiles(s.columns, 32);
  int64_t most = tiles(chunk, DEPTH);
  bf16* at = a_memory.get<bf16>(blocks_m * 2 * most * WORDS);
  bf16* bt = b_memory.get<bf16>(blocks_n * 2 * most * WORDS);
  float* ct = c_memory.get<float>(chunk < k ? blocks_m * blocks_n * 1024 : 1024);
  for (int64_t from = 0; from < k; from += chunk) {
    int64_t depth = k - from < chunk ? k - from : chunk, steps = tiles(depth, DEPTH);
    bool last = from + chunk >= k;
    lay_out<true>(a, !a.transposed, s.m, s.rows, from, depth, at);
    lay_out<false>(b, b.transposed, s.n, s.columns, from, depth, bt);
    for (int64_t j = 0; j < blocks_n; j++)
      for (int64_t i = 0; i < blocks_m; i++) {
        float* c = chunk < k ? ct + (j * blocks_m + i) * 1024 : ct;
        Out* to = out + (s.m + i * 32) * stride + s.n + j * 32;
        if (last) expect(to, stride, s.rows - i * 32);
        if (from) load_c(c, 512, 256, 64);
        else zero_c();
        multiply(at + i * 2 * steps * WORDS, steps * WORDS, bt + j * 2 * steps * WORDS,
                 steps * WORDS, steps);
        store_c(c, 512, 256, 64);
        if (last)
          write(c, to, stride, s.rows - i * 32, s.columns - j * 32, add);
      }
  }
}

int64_t chunk_of(int64_t k) { return k <= 384 ? k : 256; }

struct Cut {
  int64_t rows, columns;  // of a slab
};

// Slabs whose tiles and sums lie in the second cache, cut so that the thread with the most to do
// has the least: products, and laying out tiles, which costs more where a matrix is turned.
Cut cut(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t chunk, int threads) {
  double lay_a = a.transposed ? .34 : .08, lay_b = b.transposed ? .2 : .13;  // cycles per number
  double best = 0;
  Cut found{32, 32};
  for (int64_t down = 1; down <= tiles(m, 32); down++)
    for (int64_t across = 1; across <= tiles(n, 32); across++) {
      int64_t rows = tiles(tiles(m, down), 32) * 32, columns = tiles(tiles(n, across), 32) * 32;
      if (rows * columns * 4 + (rows + columns) * chunk * 2 > CACHE) continue;
      int64_t rounds = tiles(tiles(m, rows) * tiles(n, columns), threads);
      double cost = rounds * (rows * columns * .004 + rows * lay_a + columns * lay_b);
      if (best == 0 || cost < best) best = cost, found = {rows, columns};
      if (columns == 32) break;
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
  };
  std::vector<Task> tasks;
  for (const Group& g : groups) {
    Cut c = cut(g.a, g.b, g.m, g.n, chunk_of(g.k), groups.size() > 1 ? 1 : threads);
    for (int64_t j = 0; j < g.n; j += c.columns)
      for (int64_t i = 0; i < g.m; i += c.rows)
        tasks.push_back({&g, {i, std::min(c.rows, g.m - i), j, std::min(c.columns, g.n - j)}});
  }
#pragma omp parallel num_threads(threads)
  {
    Registers registers;
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tasks.size(); t++) {
      const Group& g = *tasks[t].group;
      const Slab& s = tasks[t].slab;
      if (g.k)
        slab(g.a, g.b, s, g.k, chunk_of(g.k), out + g.out, stride, add);
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
