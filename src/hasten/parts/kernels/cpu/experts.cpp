// Tokens to their experts and back: sums of a few rows from anywhere, and the gradients of that.
#include <vector>

#include "numbers.h"

namespace {

// Row n of the output is the sum of ``each`` rows of x, those at ``places``, times ``weights``.
template <class T>
void combine(const T* x, const int64_t* places, const float* weights, T* y, int64_t rows,
             int64_t each, int64_t n, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> sums(n);
    float* sum = sums.data();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
      for (int64_t j = 0; j < each; j++) {
        const T* in = x + places[t * each + j] * n;
        float w = weights ? weights[t * each + j] : 1.f;
        if (j == 0) {
#pragma omp simd
          for (int64_t i = 0; i < n; i++) sum[i] = get(in[i]) * w;
        } else {
#pragma omp simd
          for (int64_t i = 0; i < n; i++) sum[i] += get(in[i]) * w;
        }
      }
      T* out = y + t * n;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) set(out[i], sum[i]);
    }
  }
}

// Its gradients: of each row of x, ``weight`` times the output's; of the weight, their product.
template <class T>
void combine_backward(const T* dy, const T* x, const int64_t* sources, const float* weights, T* dx,
                      float* dw, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < rows; t++) {
    const T *grad = dy + sources[t] * n, *in = x + t * n;
    T* out = dx + t * n;
    float w = weights[t], dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; i++) {
      dot += get(grad[i]) * get(in[i]);
      set(out[i], get(grad[i]) * w);
    }
    dw[t] = dot;
  }
}

}  // namespace

extern "C" {

void rows_combine(const void* x, const int64_t* places, const float* weights, void* y, int64_t rows,
                  int64_t each, int64_t n, int half, int threads) {
  BOTH(combine((const T*)x, places, weights, (T*)y, rows, each, n, threads))
}

void rows_combine_backward(const void* dy, const void* x, const int64_t* sources,
                           const float* weights, void* dx, float* dw, int64_t rows, int64_t n,
                           int half, int threads) {
  BOTH(combine_backward((const T*)dy, (const T*)x, sources, weights, (T*)dx, dw, rows, n, threads))
}
}
