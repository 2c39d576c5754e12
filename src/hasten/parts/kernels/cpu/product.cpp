// Matrix products of float or bf16 numbers with float sums, for any shape and any processor.
//
//   (1) C is cut into tasks along its longer side; a thread takes the next one when it is free
//   (2) for each block of B's columns and each chunk of k: B's panels are laid out, in the cache;
//       tasks of rows of one product read panels that all threads laid out together before
//   (3) for each block of A's rows: a copy of them, then all panels over it, ROWS x COLUMNS at a time;
//       meanwhile what is copied and laid out next comes from memory
//   (4) sums go on from chunk to chunk in float; after the last they are rounded once and written
//
// The order of a sum depends on k alone, so that the number of threads changes no bit.
#include <omp.h>

#include <atomic>
#include <vector>

#include "unit.h"

namespace {

constexpr int64_t CHUNK = 384, PANELS = 500000, BLOCK = 96;  // words of k, words of B's, rows of A's
constexpr int64_t TASK = 384;          // rows or columns of C, at least, of a task that lays out B
constexpr int64_t ALONE = 192;         // rows for each thread that are enough to lay out B alone
constexpr int64_t TOGETHER = 8000000;  // words of B that all threads lay out together

struct Group {  // one of several products that share their formats and strides
  int64_t a, b, out, m, n, k;
};

struct Call {
  int64_t a_stride, b_stride, stride;
  bool a_turned, b_turned, add;
};

// 0 < rows <= ROWS, 0 < columns <= COLUMNS of sums to the output.
template <class Unit, class Out>
void write(const float* sums, int64_t next, Out* to, int64_t stride, int64_t rows, int64_t columns,
           bool add) {
  constexpr int L = Unit::LANES, C = Unit::VECTORS * L;
  for (int64_t i = 0; i < rows; i++, to += stride, sums += next)
    if (columns < C) {
      for (int64_t j = 0; j < columns; j++) set(to[j], add ? sums[j] + get(to[j]) : sums[j]);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < C; j += L) {
        auto sum = load<L>(sums + j);
        store<L>(to + j, add ? sum + load<L>(to + j) : sum);
      }
    }
}

template <class Unit>
int64_t chunk_of(int64_t k) {
  return k <= CHUNK * Unit::EACH * 3 / 2 ? k : CHUNK * Unit::EACH;
}

// Where the panel of column ``j`` lies in B's layout, over the chunk of k from ``f`` on.
template <class Unit>
int64_t panel_offset(int64_t n, int64_t j, int64_t f, int64_t words) {
  return f / Unit::EACH * ceil_to(n, Unit::VECTORS * Unit::LANES) + j * words;
}

// One task: its part of C, a block of columns after the other. ``layout``: B's layout, or nullptr;
// ``after``: what this thread reads after the task.
template <class Unit, class T, class Out>
void block(const Call& call, Matrix<T> a, Matrix<T> b, Out* out, int64_t m, int64_t n, int64_t k,
           const typename Unit::Word* layout, Ahead after = {}) {
  typedef typename Unit::Word Word;
  constexpr int R = Unit::ROWS, C = Unit::VECTORS * Unit::LANES, E = Unit::EACH;
  static thread_local Scratch sums_memory, b_memory, a_memory;
  int64_t chunk = chunk_of<Unit>(k), most = (chunk + E - 1) / E;
  int64_t wide = std::max<int64_t>(C, PANELS / most / C * C);
  bool once = chunk >= k;
  constexpr bool direct = std::is_same<Out, float>::value;  // sums go to the output itself
  for (int64_t j0 = 0; j0 < n; j0 += wide) {
    int64_t columns = std::min(wide, n - j0), pitch = ceil_to(columns, C);
    Word* task_panels = layout ? nullptr : b_memory.get<Word>(pitch * most);
    float* sums = direct || once ? nullptr : sums_memory.get<float>(ceil_to(m, BLOCK) * pitch);
    for (int64_t f = 0; f < k; f += chunk) {
      int64_t depth = std::min(chunk, k - f), words = (depth + E - 1) / E;
      bool last = f + chunk >= k;
      for (int64_t j = 0; task_panels && j < columns; j += C)
        panel<Unit>(b.from(j0 + j, f), std::min<int64_t>(C, columns - j), depth, task_panels + j * words);
      const Word* panels = task_panels ? task_panels : layout + panel_offset<Unit>(n, j0, f, words);
      int64_t next_depth = std::min(chunk, k - f - chunk), across = pitch / C;
      Ahead next_b = task_panels && !last ? b.from(j0, f + chunk).ahead(columns, next_depth) : Ahead{};
      int64_t each_b = next_b.lines() / (across * ceil_to(m, R) / R) + 1;
      for (int64_t i0 = 0; i0 < m; i0 += BLOCK) {
        int64_t rows = std::min(BLOCK, m - i0);
        auto x = left<Unit>(a.from(i0, f), rows, depth, a_memory.get<Word>(left_room(BLOCK, most)));
        int64_t next_rows = std::min(BLOCK, m - i0 - rows);
        Ahead next_a = next_rows ? a.from(i0 + rows, f).ahead(next_rows, depth)
                       : last ? after
                              : a.from(0, f + chunk).ahead(std::min(BLOCK, m), next_depth);
        int64_t each_a = next_a.lines() / (across * ceil_to(rows, R) / R) + 1;
        for (int64_t j = 0; j < columns; j += C)
          for (int64_t i = 0; i < rows; i += R) {
            next_a.ask(each_a);
            next_b.ask(each_b);
            Left<Word> here = x.from(i / R);
            int64_t down = std::min<int64_t>(R, rows - i), right = std::min<int64_t>(C, columns - j);
            Out* to = out + (i0 + i) * call.stride + j0 + j;
            const Word* y = panels + j * words;
            alignas(64) float tile[R * C];
            float* c = sums ? sums + (i0 + i) * pitch + j : nullptr;
            bool add = call.add || (f > 0 && !c);
            if (c && !last) {
              multiply<Unit>(here, y, words, c, pitch, f > 0);
            } else if (down == R && right == C) {
              multiply<Unit>(here, y, words, to, call.stride, add, c, pitch);
            } else {
              multiply<Unit>(here, y, words, tile, C, false, c, pitch);
              write<Unit>(tile, C, to, call.stride, down, right, add);
            }
          }
      }
    }
  }
}

// Tasks of rows of one product: all threads lay out B, as many columns at a time as fit. Threads get
// equally many tasks, of up to BLOCK rows or one each, so that they end together. With a task a
// thread takes the one after it, and asks memory for its rows.
template <class Unit, class T, class Out>
void rows_together(const Call& call, Matrix<T> a, Matrix<T> b, Out* out, int64_t m, int64_t n,
                   int64_t k, int threads) {
  typedef typename Unit::Word Word;
  constexpr int C = Unit::VECTORS * Unit::LANES, E = Unit::EACH;
  static thread_local Scratch memory;
  int64_t chunk = chunk_of<Unit>(k), chunks = (k + chunk - 1) / chunk, words = (k + E - 1) / E;
  int64_t wide = std::min(std::max<int64_t>(C, TOGETHER / words / C * C), ceil_to(n, C));
  int64_t turns = m < 2 * threads * BLOCK ? 1 : (m + threads * BLOCK - 1) / (threads * BLOCK);
  int64_t parts = threads * turns;
  int64_t each = ceil_to((m + parts - 1) / parts, Unit::ROWS), tasks = (m + each - 1) / each;
  Word* layout = memory.get<Word>(wide * words);
  std::vector<std::atomic<int64_t>> taken((n + wide - 1) / wide);
#pragma omp parallel num_threads(threads)
  for (int64_t j0 = 0; j0 < n; j0 += wide) {
    int64_t columns = std::min(wide, n - j0), panels = (columns + C - 1) / C;
#pragma omp for schedule(dynamic, 8)
    for (int64_t p = 0; p < chunks * panels; p++) {
      int64_t f = p / panels * chunk, j = p % panels * C, depth = std::min(chunk, k - f);
      int64_t offset = panel_offset<Unit>(columns, j, f, (depth + E - 1) / E);
      panel<Unit>(b.from(j0 + j, f), std::min<int64_t>(C, columns - j), depth, layout + offset);
    }
    for (int64_t t = omp_get_thread_num(), then; t < tasks; t = then) {
      then = omp_get_num_threads() + taken[j0 / wide]++;
      int64_t from = t * each, rows = std::min(each, m - from), next_rows = std::min(each, m - then * each);
      Ahead after = then < tasks ? a.from(then * each, 0).ahead(next_rows, std::min(chunk, k)) : Ahead{};
      block<Unit>(call, a.from(from, 0), b, out + from * call.stride + j0, rows, columns, k, layout, after);
    }
#pragma omp barrier
  }
}

template <class Unit, class T, class Out>
void products(const T* a, const T* b, Out* out, const Call& call, const int64_t* groups,
              int64_t count, int threads) {
  struct Task {
    Group group;
    int64_t from, to;
    bool rows;
  };
  auto left_of = [&](const Group& g) {
    return Matrix<T>{a + g.a, call.a_turned ? 1 : call.a_stride, call.a_turned ? call.a_stride : 1};
  };
  auto right_of = [&](const Group& g) {
    return Matrix<T>{b + g.b, call.b_turned ? call.b_stride : 1, call.b_turned ? 1 : call.b_stride};
  };
  std::vector<Task> tasks;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* at = groups + 6 * i;
    Group g{at[0], at[1], at[2], at[3], at[4], at[5]};
    bool rows = g.m >= g.n;
    int64_t side = rows ? g.m : g.n;
    if (!g.m || !g.n) continue;
    // A chunk of B that a thread lays out alone is in its cache, which pays where many chunks follow.
    bool alone = g.k > 2 * chunk_of<Unit>(g.k) && g.m >= ALONE * threads;
    if (count == 1 && rows && g.k && g.m > BLOCK && !alone) {
      rows_together<Unit>(call, left_of(g), right_of(g), out + g.out, g.m, g.n, g.k, threads);
      return;
    }
    // A task pays for laying out the other side. Up to four for each thread even out their ends.
    int64_t parts = std::max<int64_t>(1, std::min<int64_t>(side / TASK, threads > 1 ? 4 * threads : 1));
    if (parts > threads) parts = parts / threads * threads;
    if (threads > 1 && parts < threads) parts = std::min<int64_t>(threads, (side + 95) / 96);
    int64_t each = ceil_to((side + parts - 1) / parts, rows ? Unit::ROWS : Unit::VECTORS * Unit::LANES);
    for (int64_t from = 0; from < side; from += each)
      tasks.push_back({g, from, std::min(side, from + each), rows});
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && tasks.size() > 1)
  for (size_t t = 0; t < tasks.size(); t++) {
    const Group& g = tasks[t].group;
    int64_t from = tasks[t].from, to = tasks[t].to;
    int64_t m = tasks[t].rows ? to - from : g.m, n = tasks[t].rows ? g.n : to - from;
    Matrix<T> x = left_of(g), y = right_of(g);
    Out* place = out + g.out + (tasks[t].rows ? from * call.stride : from);
    (tasks[t].rows ? x.at : y.at) += from * (tasks[t].rows ? x.line : y.line);
    if (g.k)
      block<Unit>(call, x, y, place, m, n, g.k, nullptr);
    else if (!call.add)
      for (int64_t i = 0; i < m; i++) std::memset((void*)(place + i * call.stride), 0, n * sizeof(Out));
  }
}

}  // namespace

extern "C" {

// ``kind``: 1 A is transposed, 2 B is transposed, 4 the output is float, 8 it is added to, 16 the
// inputs are float. ``unit``: 0 floats, 1 pairs of bf16. ``groups`` (count, 6): where A, B and the
// output of each begin, in numbers; its m, n and k.
void unit_gemm(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* out,
               int64_t stride, const int64_t* groups, int64_t count, int kind, int unit,
               int threads) {
  Call call{a_stride, b_stride, stride, (kind & 1) != 0, (kind & 2) != 0, (kind & 8) != 0};
  auto run = [&](auto unit, auto in, auto to) {
    typedef decltype(unit) Unit;
    products<Unit>((const decltype(in)*)a, (const decltype(in)*)b, (decltype(to)*)out, call, groups,
                   count, threads);
  };
  if (kind & 16) {
    if (kind & 4) run(Wide(), float(), float());
    else run(Wide(), float(), bf16());
  } else if (unit) {
    if (kind & 4) run(Narrow(), bf16(), float());
    else run(Narrow(), bf16(), bf16());
  } else {
    if (kind & 4) run(Wide(), bf16(), float());
    else run(Wide(), bf16(), bf16());
  }
}
}
