// Matrix products over packed weights.
//
// One panel (2 W columns, all of k) is the unit of work of a thread; rows pass through it in tiles of up to
// kTile rows, whose sums live in registers. Each sum runs over k in order, whatever the tile's height.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kTile = 12;
#else
constexpr int kTile = 4;
#endif

// c += the two products of a pair of k's.
#if defined(__AVX512BF16__)
WG_INLINE V dot_pair(VU a, VU b, V c) {
  return (V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#else
WG_INLINE V dot_pair(VU a, VU b, V c) {
  return madd(high_half(a), high_half(b), madd(low_half(a), low_half(b), c));
}
#endif

WG_INLINE VU splat_word(const void* p) {
  uint32_t word;
  memcpy(&word, p, sizeof word);
  return VU{} + word;
}

// Bytes of weight ahead of use that are asked for: one panel streams through once, and hardware prefetch stops
// at each 4 KiB page.
constexpr int kAhead = 2048;

// c[m] += x[m] . w over k values, for M rows of x, `stride` apart, and the columns of one panel.
template <int M>
WG_INLINE void panel_sums(V (&c)[M][2], const float* x, int64_t stride, int64_t k, const float* w) {
  for (int64_t i = 0; i < k; i++, w += 2 * W) {
    __builtin_prefetch((const char*)w + kAhead);
    if (W == 16) __builtin_prefetch((const char*)w + kAhead + 64);
    V b0 = load(w), b1 = load(w + W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      V a = splat(x[m * stride + i]);
      c[m][0] = madd(a, b0, c[m][0]);
      c[m][1] = madd(a, b1, c[m][1]);
    }
  }
}

template <int M>
WG_INLINE void panel_sums(V (&c)[M][2], const bf16* x, int64_t stride, int64_t k, const bf16* w) {
  int64_t i = 0;
  for (; i + 1 < k; i += 2, w += 4 * W) {
    __builtin_prefetch((const char*)w + kAhead);
    if (W == 16) __builtin_prefetch((const char*)w + kAhead + 64);
    VU b0 = load_words(w), b1 = load_words(w + 2 * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      VU a = splat_word(x + m * stride + i);
      c[m][0] = dot_pair(a, b0, c[m][0]);
      c[m][1] = dot_pair(a, b1, c[m][1]);
    }
  }
  if (i < k) {  // the second half of the last pair is nobody's
    VU b0 = load_words(w) & 0xffffu, b1 = load_words(w + 2 * W) & 0xffffu;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      VU a = VU{} + (uint32_t)x[m * stride + i].bits;
      c[m][0] = dot_pair(a, b0, c[m][0]);
      c[m][1] = dot_pair(a, b1, c[m][1]);
    }
  }
}

template <int M = kTile, class F>
WG_INLINE void with_rows(int m, int64_t row, const F& f) {
  if (m == M) return f.template operator()<M>(row);
  if constexpr (M > 1) with_rows<M - 1>(m, row, f);
}

// Calls f<rows>(first row) for rows [first, last) in tiles as equal in height as can be.
template <class F>
WG_INLINE void for_tiles(int64_t first, int64_t last, const F& f) {
  int64_t tiles = (last - first + kTile - 1) / kTile;
  for (int64_t t = 0; t < tiles; t++) {
    int64_t row = first + (last - first) * t / tiles;
    with_rows((int)(first + (last - first) * (t + 1) / tiles - row), row, f);
  }
}

// silu(gate) * up, rounded where the reference rounds: both products, the activation, the result.
template <class T>
WG_INLINE V gated(V gate, V up) {
  gate = rounded<T>(gate);
  V activation = gate / (1.0f + exponential(-gate));
  return rounded<T>(activation) * rounded<T>(up);
}

WG_INLINE int64_t panel_width(const wavegraph::Linear& a) { return a.silu_mul ? W : 2 * W; }

// Where a panel's weights begin. In bf16 an odd k is filled up to a pair.
template <class T>
WG_INLINE const T* panel_weights(const wavegraph::Linear& a, int64_t panel) {
  int64_t padded = sizeof(T) == 2 ? (a.k + 1) / 2 * 2 : a.k;
  return (const T*)a.w + panel * padded * 2 * W;
}

// Writes one row's sums over a panel.
template <class T>
WG_INLINE void finish(const wavegraph::Linear& a, int64_t panel, int64_t row, V first, V second) {
  int64_t width = panel_width(a), column = panel * width;
  int left = (int)least(width, a.n - column);
  T* out = (T*)a.out + row * a.n + column;
  if (a.silu_mul) return store(out, gated<T>(first, second), left);
  store(out, first, least(left, W));
  if (left > W) store(out + W, second, left - W);
}

template <class T>
void panel_rows(const wavegraph::Linear& a, int64_t panel, int64_t first, int64_t last) {
  for_tiles(first, last, [&]<int M>(int64_t row) {
    V c[M][2] = {};
    panel_sums<M>(c, (const T*)a.x + row * a.k, a.k, a.k, panel_weights<T>(a, panel));
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) finish<T>(a, panel, row + m, c[m][0], c[m][1]);
  });
}

#if defined(__AMX_BF16__)
template <>
void panel_rows<bf16>(const wavegraph::Linear& a, int64_t panel, int64_t first, int64_t last);  // amx.h
#endif

template <class T>
void linear_typed(const wavegraph::Linear& a, int threads) {
  int64_t panels = (a.n + panel_width(a) - 1) / panel_width(a);
  // With few panels for the threads at hand, rows are divided too.
  int64_t parts = least((a.rows + 4 * kTile - 1) / (4 * kTile), (4 * (int64_t)threads + panels - 1) / panels);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < panels * parts; item++) {
    int64_t part = item % parts;
    panel_rows<T>(a, item / parts, a.rows * part / parts, a.rows * (part + 1) / parts);
  }
}

void linear(const wavegraph::Linear& a, wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? linear_typed<float>(a, threads) : linear_typed<bf16>(a, threads);
}

}  // namespace
