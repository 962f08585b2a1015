// bfloat16 products in AMX tiles: up to 32 rows by one panel of 32 columns, 32 k's at a time.
//
// Used only where it passes its own comparison with the AVX-512 kernels when the library is loaded.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear.h"

namespace {

static_assert(W == 16, "a panel is two tiles wide");

constexpr int kTileDepth = 32;  // k's in a tile

// Tiles 0..3 hold sums (rows 0-15 and 16-31 by columns 0-15 and 16-31), 4 and 5 rows of x, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  TileConfig(int upper, int lower) {
    const int height[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; i++) rows[i] = (uint8_t)height[i];
  }
};

WG_INLINE void take_depth(const bf16* x, int64_t x_bytes, const bf16* w, bool lower) {
  _tile_loadd(6, w, 128);
  _tile_loadd(7, w + 32, 128);
  _tile_loadd(4, x, x_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (!lower) return;
  _tile_loadd(5, (const char*)x + 16 * x_bytes, x_bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Sums of m rows (1..32) over a panel, `out [m][32]`. What is left of k after whole tiles is filled up with zeros.
void tile_sums(float* out, const bf16* x, int m, int64_t k, const bf16* w) {
  bool lower = m > 16;
  TileConfig config(least(m, 16), lower ? m - 16 : 16);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  if (lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  int64_t at = 0;
  for (; at + kTileDepth <= k; at += kTileDepth) take_depth(x + at, k * 2, w + at * 32, lower);
  if (at < k) {
    alignas(64) bf16 x_rest[32 * kTileDepth] = {}, w_rest[kTileDepth * 32] = {};
    for (int row = 0; row < m; row++) memcpy(x_rest + row * kTileDepth, x + row * k + at, (k - at) * 2);
    memcpy(w_rest, w + at * 32, (k - at + 1) / 2 * 2 * 64);
    take_depth(x_rest, kTileDepth * 2, w_rest, lower);
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  if (lower) {
    _tile_stored(2, out + 16 * 32, 128);
    _tile_stored(3, out + 16 * 32 + 16, 128);
  }
  _tile_release();
}

template <>
void panel_rows<bf16>(const wavegraph::Linear& a, int64_t panel, int64_t first, int64_t last) {
  alignas(64) float sums[32 * 32];
  for (int64_t row = first; row < last; row += 32) {
    int m = (int)least<int64_t>(32, last - row);
    tile_sums(sums, (const bf16*)a.x + row * a.k, m, a.k, panel_weights<bf16>(a, panel));
    for (int i = 0; i < m; i++) finish<bf16>(a, panel, row + i, load(sums + i * 32), load(sums + i * 32 + 16));
  }
}

// Asks the system for the tiles, then compares: with the reference kernels nearly, and a row alone exactly.
bool tiles_work(const wavegraph::Kernels* reference) {
  constexpr int kRows = 37, kInputs = 69, kOutputs = 40, kPanels = 2, kPadded = 70;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (reference == nullptr || syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  bf16 x[kRows * kInputs], w[kPanels * kPadded * 32];
  bf16 got[kRows * kOutputs], expected[kRows * kOutputs], alone[kOutputs];
  uint32_t state = 1;
  auto fill = [&](bf16* to, int count) {
    for (int i = 0; i < count; i++) {
      state = state * 1664525u + 1013904223u;
      to[i].bits = (uint16_t)(bits_of<uint32_t>((float)(state >> 16) / 32768.0f - 1.0f) >> 16);
    }
  };
  fill(x, kRows * kInputs);
  fill(w, kPanels * kPadded * 32);
  wavegraph::Linear a{got, x, w, kRows, kOutputs, kInputs, false};
  linear(a, wavegraph::kBFloat16, 1);
  a.out = expected;
  reference->linear(a, wavegraph::kBFloat16, 1);
  for (int i = 0; i < kRows * kOutputs; i++) {
    float error = to_float(got[i]) - to_float(expected[i]);
    if (!(__builtin_fabsf(error) <= 0.01f * __builtin_fabsf(to_float(expected[i])) + 1e-3f)) return false;
  }
  for (int row = 0; row < kRows; row++) {
    wavegraph::Linear one{alone, x + row * kInputs, w, 1, kOutputs, kInputs, false};
    linear(one, wavegraph::kBFloat16, 1);
    if (memcmp(alone, got + row * kOutputs, sizeof alone) != 0) return false;
  }
  return true;
}

}  // namespace
