// What the bindings ask of the kernels: one table of functions per instruction set, over raw pointers.
//
// Contract of every function: a row's result is made by a sequence of operations that depends on that row alone,
// never on the number of rows, the row's place, its neighbours or `threads`.
#pragma once

#include <stdint.h>

namespace wavegraph {

enum Type { kFloat32, kBFloat16 };

// out [rows, n] = x [rows, k] @ w.T. `w` is packed: panels of 2 * lanes columns, in each of which the columns'
// values for one k stand side by side (bf16: for a pair of k's, the two values of a column together).
// With `silu_mul`, a panel holds `lanes` gate columns and the same `lanes` up columns; n counts one of the two.
struct Linear {
  void* out;
  const void* x;
  const void* w;
  int64_t rows, n, k;
  bool silu_mul;
};

struct Norm {
  void* x;                  // [rows, size]; written only if `branch` is given
  void* out;                // [rows, size]
  const void* branch;       // [rows, size] or null
  const void* branch_weight;
  const void* weight;
  int64_t rows, size;
  float eps;
};

// Where each row lives. Rows whose page is `scratch_page` are padding.
struct Rows {
  const int32_t *slot, *pos, *depth, *page, *offset;
  int64_t rows;
  int32_t scratch_page;
};

// k, v [pages, depths, layers, page_size, kv_heads, head_dim], of which one layer is meant.
struct Cache {
  void *k, *v;
  int64_t depths, layers, layer, page_size, kv_heads, head_dim;
};

struct Rope {
  void* qkv;  // [rows, (heads + 2 kv_heads) head_dim]
  const void *cos, *sin;  // [positions, head_dim]
  int64_t heads;
};

// Up to kTileRows consecutive rows of one slot and depth at adjacent positions.
struct Tile {
  int32_t row, rows;
};
constexpr int kTileRows = 32;
constexpr int kMaxHeadDim = 256;

struct Attention {
  void* out;        // [rows, heads * head_dim]
  const void* qkv;  // [rows, (heads + 2 kv_heads) head_dim]
  int64_t heads;
  const int32_t* page_table;  // [slots, pages_per_slot]
  int64_t pages_per_slot;
  const Tile* tiles;
  int64_t tile_count;
};

struct ScatterGate {
  const void* h;  // [rows, size]
  void* hidden;   // [pages, page_size, size]
  const void* weight;
  const void* bias;
  float* gate;    // [pages, page_size, depths]
  int64_t size, page_size, depths;
};

struct Kernels {
  const char* name;
  int lanes;
  bool (*usable)(const Kernels* reference);  // null: usable wherever the CPU has the instructions
  void (*linear)(const Linear&, Type, int threads);
  void (*norm)(const Norm&, Type, int threads);
  void (*rope_write)(const Rope&, const Rows&, const Cache&, Type, int threads);
  void (*attention)(const Attention&, const Rows&, const Cache&, Type, int threads);
  void (*scatter_gate)(const ScatterGate&, const Rows&, Type, int threads);
  void (*argmax)(int32_t* out, const void* x, int64_t rows, int64_t n, Type, int threads);
};

}  // namespace wavegraph
