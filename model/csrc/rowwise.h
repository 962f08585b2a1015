// What is computed row by row: norms, rotation and KV write, gate, argmax.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

// Fewer elements than this are not worth waking threads for.
constexpr int64_t kSerial = 1 << 14;

template <class T>
WG_INLINE float inverse_rms(const T* x, int64_t n, float eps) {
  V even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    V a = load(x + i), b = load(x + i + W);
    even = madd(a, a, even);
    odd = madd(b, b, odd);
  }
  for (; i < n; i += W) {
    V a = load(x + i, (int)least<int64_t>(W, n - i));
    even = madd(a, a, even);
  }
  return 1.0f / __builtin_sqrtf(sum(even + odd) / (float)n + eps);
}

template <class T>
WG_INLINE V normed(const T* x, float scale, const T* weight, int n) {
  return rounded<T>(rounded<T>(load(x, n) * scale) * load(weight, n));
}

template <class T>
void norm_row(const wavegraph::Norm& a, int64_t row) {
  T* x = (T*)a.x + row * a.size;
  T* out = (T*)a.out + row * a.size;
  if (a.branch) {
    const T* branch = (const T*)a.branch + row * a.size;
    float scale = inverse_rms(branch, a.size, a.eps);
    for (int64_t i = 0; i < a.size; i += W) {
      int n = (int)least<int64_t>(W, a.size - i);
      store(x + i, load(x + i, n) + normed(branch + i, scale, (const T*)a.branch_weight + i, n), n);
    }
  }
  float scale = inverse_rms(x, a.size, a.eps);
  for (int64_t i = 0; i < a.size; i += W) {
    int n = (int)least<int64_t>(W, a.size - i);
    store(out + i, normed(x + i, scale, (const T*)a.weight + i, n), n);
  }
}

template <class T>
void norm_typed(const wavegraph::Norm& a, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && a.rows * a.size > kSerial)
  for (int64_t row = 0; row < a.rows; row++) norm_row<T>(a, row);
}

void norm(const wavegraph::Norm& a, wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? norm_typed<float>(a, threads) : norm_typed<bf16>(a, threads);
}

// Element offset of (row, layer) in a cache plane; a position's heads lie behind it.
WG_INLINE int64_t cache_offset(const wavegraph::Cache& c, int64_t page, int64_t depth, int64_t offset) {
  return (((page * c.depths + depth) * c.layers + c.layer) * c.page_size + offset) * c.kv_heads * c.head_dim;
}

// Each product and the sum are rounded, as the reference does.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int half) {
  for (int i = 0; i < half; i += W) {
    int n = least(W, half - i);
    V low = load(x + i, n), high = load(x + half + i, n);
    V low_cos = rounded<T>(low * load(cos + i, n)), high_sin = rounded<T>(high * load(sin + i, n));
    V high_cos = rounded<T>(high * load(cos + half + i, n)), low_sin = rounded<T>(low * load(sin + half + i, n));
    store(x + i, low_cos - high_sin, n);
    store(x + half + i, high_cos + low_sin, n);
  }
}

template <class T>
void rope_row(const wavegraph::Rope& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache, int64_t row) {
  if (rows.page[row] == rows.scratch_page) return;
  int64_t d = cache.head_dim, kv_size = cache.kv_heads * d;
  T* q = (T*)a.qkv + row * (a.heads * d + 2 * kv_size);
  const T* cos = (const T*)a.cos + rows.pos[row] * d;
  const T* sin = (const T*)a.sin + rows.pos[row] * d;
  for (int64_t head = 0; head < a.heads + cache.kv_heads; head++) rotate(q + head * d, cos, sin, (int)d / 2);
  int64_t at = cache_offset(cache, rows.page[row], rows.depth[row], rows.offset[row]);
  memcpy((T*)cache.k + at, q + a.heads * d, kv_size * sizeof(T));
  memcpy((T*)cache.v + at, q + a.heads * d + kv_size, kv_size * sizeof(T));
}

template <class T>
void rope_typed(const wavegraph::Rope& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache, int threads) {
  int64_t size = (a.heads + 2 * cache.kv_heads) * cache.head_dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows.rows * size > kSerial)
  for (int64_t row = 0; row < rows.rows; row++) rope_row<T>(a, rows, cache, row);
}

void rope_write(const wavegraph::Rope& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache,
                wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? rope_typed<float>(a, rows, cache, threads) : rope_typed<bf16>(a, rows, cache, threads);
}

template <class T>
void scatter_gate_row(const wavegraph::ScatterGate& a, const wavegraph::Rows& rows, int64_t row) {
  if (rows.page[row] == rows.scratch_page) return;
  const T* h = (const T*)a.h + row * a.size;
  V dot{};
  for (int64_t i = 0; i < a.size; i += W) {
    int n = (int)least<int64_t>(W, a.size - i);
    dot = madd(load(h + i, n), load((const T*)a.weight + i, n), dot);
  }
  int64_t at = rows.page[row] * a.page_size + rows.offset[row];
  a.gate[at * a.depths + rows.depth[row]] = rounded<T>(sum(dot) + to_float(*(const T*)a.bias));
  memcpy((T*)a.hidden + at * a.size, h, a.size * sizeof(T));
}

template <class T>
void scatter_gate_typed(const wavegraph::ScatterGate& a, const wavegraph::Rows& rows, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows.rows * a.size > kSerial)
  for (int64_t row = 0; row < rows.rows; row++) scatter_gate_row<T>(a, rows, row);
}

void scatter_gate(const wavegraph::ScatterGate& a, const wavegraph::Rows& rows, wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? scatter_gate_typed<float>(a, rows, threads)
                              : scatter_gate_typed<bf16>(a, rows, threads);
}

// The first of the largest; a NaN is never larger, and a row without numbers gives 0.
template <class T>
int32_t argmax_row(const T* x, int64_t n) {
  V best = splat(-__builtin_inff());
  for (int64_t i = 0; i + W <= n; i += W) {
    V v = load(x + i);
    best = v > best ? v : best;
  }
  float most = largest(best);
  for (int64_t i = n / W * W; i < n; i++) most = to_float(x[i]) > most ? to_float(x[i]) : most;
  for (int64_t i = 0; i < n; i++)
    if (to_float(x[i]) == most) return (int32_t)i;
  return 0;
}

template <class T>
void argmax_typed(int32_t* out, const T* x, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > kSerial)
  for (int64_t row = 0; row < rows; row++) out[row] = argmax_row(x + row * n, n);
}

void argmax(int32_t* out, const void* x, int64_t rows, int64_t n, wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? argmax_typed(out, (const float*)x, rows, n, threads)
                              : argmax_typed(out, (const bf16*)x, rows, n, threads);
}

}  // namespace
