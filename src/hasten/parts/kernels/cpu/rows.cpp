// Passes over the rows of a tensor, each fused from what would be several: RMS norm, rotary
// embedding, gated SiLU, cross-entropy, AdamW. Numbers are bf16 or float, sums are float; each
// result is rounded once. Plain C++ for any processor: the compiler makes vectors of the loops.
#include <vector>

#include "numbers.h"

namespace {

// Equal pieces of ``count`` numbers, each by one thread.
template <class Piece>
void in_pieces(int64_t count, int threads, Piece piece) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < threads; i++) piece(count * i / threads, count * (i + 1) / threads);
}

template <class T>
void rms_norm(const T* x, const T* w, T* y, float* inverse, int64_t rows, int64_t n, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t t = 0; t < rows; t++) {
    const T* in = x + t * n;
    T* out = y + t * n;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += get(in[i]) * get(in[i]);
    float q = inverse[t] = 1.f / std::sqrt(sum / n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) set(out[i], get(in[i]) * q * get(w[i]));
  }
}

// ``more`` is added to dx where it is given: the gradient that came past the norm.
// ``dw`` (threads, n) is summed per thread and must be zero at the start.
template <class T>
void rms_norm_backward(const T* dy, const T* x, const T* w, const float* inverse, const T* more,
                       T* dx, float* dw, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t piece = 0; piece < threads; piece++) {
    float* d = dw + piece * n;
    for (int64_t t = rows * piece / threads; t < rows * (piece + 1) / threads; t++) {
      const T *in = x + t * n, *grad = dy + t * n, *past = more ? more + t * n : nullptr;
      T* out = dx + t * n;
      float q = inverse[t], dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < n; i++) dot += get(grad[i]) * get(w[i]) * get(in[i]);
      float c = dot * q * q * q / n;
      if (past) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
          float g = get(grad[i]), v = get(in[i]);
          d[i] += g * v * q;
          set(out[i], get(past[i]) + g * get(w[i]) * q - v * c);
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
          float g = get(grad[i]), v = get(in[i]);
          d[i] += g * v * q;
          set(out[i], g * get(w[i]) * q - v * c);
        }
      }
    }
  }
}

// SiLU(gate) * up, each (rows, n).
template <class T>
void swiglu(const T* gate, const T* up, T* y, int64_t count, int threads) {
  in_pieces(count, threads, [=](int64_t from, int64_t end) {
#pragma omp simd
    for (int64_t i = from; i < end; i++) {
      float g = get(gate[i]);
      set(y[i], g * sigmoid(g) * get(up[i]));
    }
  });
}

template <class T>
void swiglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t count,
                     int threads) {
  in_pieces(count, threads, [=](int64_t from, int64_t end) {
#pragma omp simd
    for (int64_t i = from; i < end; i++) {
      float g = get(gate[i]), s = sigmoid(g), d = get(dy[i]);
      set(dup[i], d * g * s);
      set(dgate[i], d * get(up[i]) * s * (1.f + g * (1.f - s)));
    }
  });
}

// Rotary embedding of the columns from ``first`` on, of rows (heads, width); the others are copied.
// The two numbers of a pair lie side by side (PAIRS) or half of the columns apart, on either side.
// Tables of (width - first) / 2 columns, with ``table`` numbers from row to row. ``sign`` -1 turns back,
// which is the gradient.
template <bool PAIRS_IN, bool PAIRS_OUT, class T, class U>
void rotate(const T* x, int64_t row, int64_t head, const U* cos, const U* sin, int64_t table, T* y,
            int64_t rows, int64_t heads, int64_t width, int64_t first, float sign, int threads) {
  int64_t half = (width - first) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < heads; h++) {
      const T* in = x + t * row + h * head;
      T* out = y + (t * heads + h) * width;
      const U *c = cos + t * table, *s = sin + t * table;
      std::memcpy(out, in, first * sizeof(T));
      in += first, out += first;
#pragma omp simd
      for (int64_t i = 0; i < half; i++) {
        float a = get(in[PAIRS_IN ? 2 * i : i]), b = get(in[PAIRS_IN ? 2 * i + 1 : i + half]);
        float u = get(c[i]), v = sign * get(s[i]);
        set(out[PAIRS_OUT ? 2 * i : i], a * u - b * v);
        set(out[PAIRS_OUT ? 2 * i + 1 : i + half], b * u + a * v);
      }
    }
}

template <class T, class U>
void rotate_any(int pairs, const T* x, int64_t row, int64_t head, const U* cos, const U* sin,
                int64_t table, T* y, int64_t rows, int64_t heads, int64_t width, int64_t first,
                float sign, int threads) {
  auto go = [&](auto run) {
    run(x, row, head, cos, sin, table, y, rows, heads, width, first, sign, threads);
  };
  if (pairs == 0) go(rotate<false, false, T, U>);
  else if (pairs == 1) go(rotate<true, false, T, U>);
  else if (pairs == 2) go(rotate<false, true, T, U>);
  else go(rotate<true, true, T, U>);
}

// Rows of logits become d loss / d logits of a summed loss; ``losses`` (rows,) in float.
template <class T>
void cross_entropy(T* logits, const int64_t* labels, float* losses, int64_t rows, int64_t n,
                   int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> powers(n);
    float* e = powers.data();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
      T* x = logits + t * n;
      float most = -INFINITY, sum = 0, wanted = get(x[labels[t]]);
#pragma omp simd reduction(max : most)
      for (int64_t i = 0; i < n; i++) most = get(x[i]) > most ? get(x[i]) : most;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += e[i] = exponential(get(x[i]) - most);
      losses[t] = most + std::log(sum) - wanted;
      float by = 1.f / sum;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) set(x[i], e[i] * by);
      set(x[labels[t]], e[labels[t]] * by - 1.f);
    }
  }
}

struct Rule {  // of AdamW, with the corrections of this step already in ``rate`` and ``root``
  float rate, keep, beta1, gain1, beta2, gain2, root, eps, clip;  // gain = 1 - beta
};

template <class T, bool COPY>
void adamw(const T* grad, float* w, float* m, float* v, bf16* copy, int64_t count, const Rule& r,
           int threads) {
  in_pieces(count, threads, [=](int64_t from, int64_t end) {
#pragma omp simd
    for (int64_t i = from; i < end; i++) {
      float g = get(grad[i]) * r.clip;
      float first = m[i] = r.beta1 * m[i] + r.gain1 * g;
      float second = v[i] = r.beta2 * v[i] + r.gain2 * g * g;
      float x = w[i] = w[i] * r.keep - r.rate * first / (std::sqrt(second) * r.root + r.eps);
      if (COPY) set(copy[i], x);
    }
  });
}

}  // namespace

extern "C" {

void rows_rms_norm(const void* x, const void* w, void* y, float* inverse, int64_t rows, int64_t n,
                   float eps, int half, int threads) {
  BOTH(rms_norm((const T*)x, (const T*)w, (T*)y, inverse, rows, n, eps, threads))
}

void rows_rms_norm_backward(const void* dy, const void* x, const void* w, const float* inverse,
                            const void* more, void* dx, float* dw, int64_t rows, int64_t n,
                            int half, int threads) {
  BOTH(rms_norm_backward((const T*)dy, (const T*)x, (const T*)w, inverse, (const T*)more, (T*)dx,
                         dw, rows, n, threads))
}

void rows_swiglu(const void* gate, const void* up, void* y, int64_t count, int half, int threads) {
  BOTH(swiglu((const T*)gate, (const T*)up, (T*)y, count, threads))
}

void rows_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                          int64_t count, int half, int threads) {
  BOTH(swiglu_backward((const T*)dy, (const T*)gate, (const T*)up, (T*)dgate, (T*)dup, count,
                       threads))
}

// ``pairs``: 1 the input's, 2 the output's lie side by side; ``half_table``: the tables are bf16.
void rows_rotate(const void* x, int64_t row, int64_t head, const void* cos, const void* sin,
                 int64_t table, void* y, int64_t rows, int64_t heads, int64_t width, int64_t first,
                 float sign, int pairs, int half, int half_table, int threads) {
  auto go = [&](auto number) {
    typedef decltype(number) U;
    BOTH(rotate_any(pairs, (const T*)x, row, head, (const U*)cos, (const U*)sin, table, (T*)y, rows,
                    heads, width, first, sign, threads))
  };
  if (half_table) go(bf16());
  else go(float());
}

void rows_cross_entropy(void* logits, const int64_t* labels, float* losses, int64_t rows,
                        int64_t n, int half, int threads) {
  BOTH(cross_entropy((T*)logits, labels, losses, rows, n, threads))
}

void rows_adamw(const void* grad, float* w, float* m, float* v, void* copy, int64_t count,
                const double* rule, int half, int threads) {
  // 1 - beta in double: the float next to 0.9999 is off by a 6000th of the difference.
  Rule r{(float)rule[0], (float)rule[1], (float)rule[2], (float)(1 - rule[2]), (float)rule[3],
         (float)(1 - rule[3]), (float)rule[4], (float)rule[5], (float)rule[6]};
  if (copy) {
    BOTH((adamw<T, true>((const T*)grad, w, m, v, (bf16*)copy, count, r, threads)))
  } else {
    BOTH((adamw<T, false>((const T*)grad, w, m, v, nullptr, count, r, threads)))
  }
}
}
