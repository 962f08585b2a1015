// The operators as PyTorch sees them.
//
// `isa` indexes kIsas and chooses the kernels; outputs are arguments, and nothing is allocated that outlives a call.
// A row is padding if its page is the scratch page (the pool's last): it touches nothing but its own rows.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "checks.h"
#include "exits.h"
#include "kernels.h"
#include "tables.h"

extern "C" {
// Those that the compiler could not make are null.
#define WG_DECLARE(isa) extern const wavegraph::Kernels wavegraph_kernels_##isa __attribute__((weak));
WG_DECLARE(portable)
WG_DECLARE(avx2)
WG_DECLARE(avx512)
WG_DECLARE(avx512_bf16)
WG_DECLARE(amx)
}

namespace {

using wavegraph::Kernels;

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*cpu_has)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
  return has_avx512_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx() { return false; }
#endif
bool always() { return true; }

// From the slowest to the fastest.
const Isa kIsas[] = {
    {"portable", &wavegraph_kernels_portable, always},
    {"avx2", &wavegraph_kernels_avx2, has_avx2},
    {"avx512", &wavegraph_kernels_avx512, has_avx512},
    {"avx512_bf16", &wavegraph_kernels_avx512_bf16, has_avx512_bf16},
    {"amx", &wavegraph_kernels_amx, has_amx},
};
constexpr int64_t kIsaCount = sizeof kIsas / sizeof kIsas[0];

bool usable(const Isa& isa) {
  if (isa.kernels == nullptr || !isa.cpu_has()) return false;
  return isa.kernels->usable == nullptr || isa.kernels->usable(&wavegraph_kernels_avx512_bf16);
}

const Kernels& kernels_of(int64_t isa) {
  TORCH_CHECK(isa >= 0 && isa < kIsaCount && kIsas[isa].kernels, "isa: no kernels numbered ", isa);
  return *kIsas[isa].kernels;
}

int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_linear(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t rows, int64_t isa, bool silu_mul) {
  const Kernels& kernels = kernels_of(isa);
  at::ScalarType dtype = model_dtype(x, "x");
  check_rows(x, "x", dtype, rows, {-1, -1});
  check_rows(out, "out", dtype, rows, {-1, -1});
  int64_t k = x.size(1), n = out.size(1), width = kernels.lanes * (silu_mul ? 1 : 2), columns = 2 * kernels.lanes;
  int64_t panels = (n + width - 1) / width;
  if (dtype == at::kFloat)
    check(weight, "weight", dtype, {panels, k, columns});
  else
    check(weight, "weight", dtype, {panels, (k + 1) / 2, columns, 2});
  wavegraph::Linear args{out.mutable_data_ptr(), x.const_data_ptr(), weight.const_data_ptr(), rows, n, k, silu_mul};
  kernels.linear(args, type_of(dtype), threads());
}

void linear(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t rows, int64_t isa) {
  run_linear(out, x, weight, rows, isa, false);
}

void linear_silu_mul(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t rows, int64_t isa) {
  run_linear(out, x, weight, rows, isa, true);
}

void norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps, int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(x, "x");
  check_rows(x, "x", dtype, rows, {-1, -1});
  check_rows(out, "out", dtype, rows, {-1, x.size(1)});
  check(weight, "weight", dtype, {x.size(1)});
  wavegraph::Norm args{const_cast<void*>(x.const_data_ptr()), out.mutable_data_ptr(), nullptr,    nullptr,
                       weight.const_data_ptr(),               rows,                   x.size(1), (float)eps};
  kernels_of(isa).norm(args, type_of(dtype), threads());
}

void residual_norm(const Tensor& x, const Tensor& out, const Tensor& branch, const Tensor& branch_weight,
                   const Tensor& next_weight, double eps, int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(x, "x");
  check_rows(x, "x", dtype, rows, {-1, -1});
  check_rows(out, "out", dtype, rows, {-1, x.size(1)});
  check_rows(branch, "branch", dtype, rows, {-1, x.size(1)});
  check(branch_weight, "branch_weight", dtype, {x.size(1)});
  check(next_weight, "next_weight", dtype, {x.size(1)});
  wavegraph::Norm args{x.mutable_data_ptr(),
                       out.mutable_data_ptr(),
                       branch.const_data_ptr(),
                       branch_weight.const_data_ptr(),
                       next_weight.const_data_ptr(),
                       rows,
                       x.size(1),
                       (float)eps};
  kernels_of(isa).norm(args, type_of(dtype), threads());
}

wavegraph::Cache cache_of(const Tensor& k, const Tensor& v, at::ScalarType dtype, int64_t layer) {
  check(k, "k", dtype, {-1, -1, -1, -1, -1, -1});
  check(v, "v", dtype, k.sizes());
  TORCH_CHECK(layer >= 0 && layer < k.size(2), "layer: must be in 0..", k.size(2) - 1, ", got ", layer);
  TORCH_CHECK(k.size(5) % 2 == 0 && k.size(5) <= wavegraph::kMaxHeadDim, "head_dim: must be even and at most ",
              wavegraph::kMaxHeadDim, ", got ", k.size(5));
  return {k.data_ptr(), v.data_ptr(), k.size(1), k.size(2), layer, k.size(3), k.size(4), k.size(5)};
}

// Query heads of a fused row of `width` features.
int64_t query_heads(int64_t width, const wavegraph::Cache& cache) {
  int64_t heads = width / cache.head_dim - 2 * cache.kv_heads;
  TORCH_CHECK(width % cache.head_dim == 0 && heads > 0 && heads % cache.kv_heads == 0, "qkv: ", width,
              " features are no whole groups of heads of ", cache.head_dim, " over ", cache.kv_heads, " KV heads");
  return heads;
}

void rope_write(const Tensor& qkv, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                const Tensor& row_pos, const Tensor& row_depth, const Tensor& row_page, const Tensor& row_offset,
                int64_t layer, int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(qkv, "qkv");
  check_rows(qkv, "qkv", dtype, rows, {-1, -1});
  wavegraph::Cache cache = cache_of(k, v, dtype, layer);
  check(cos, "cos", dtype, {-1, cache.head_dim});
  check(sin, "sin", dtype, {cos.size(0), cache.head_dim});
  wavegraph::Rows where{nullptr,
                        ints(row_pos, "row_pos", rows),
                        ints(row_depth, "row_depth", rows),
                        ints(row_page, "row_page", rows),
                        ints(row_offset, "row_offset", rows),
                        rows,
                        (int32_t)k.size(0) - 1};
  for (int64_t row = 0; row < rows; row++)
    TORCH_CHECK(where.pos[row] < cos.size(0), "row_pos: position ", where.pos[row], " has no angles; there are ", cos.size(0));
  wavegraph::Rope args{qkv.mutable_data_ptr(), cos.const_data_ptr(), sin.const_data_ptr(), query_heads(qkv.size(1), cache)};
  kernels_of(isa).rope_write(args, where, cache, type_of(dtype), threads());
}

// Consecutive rows of one slot and depth at adjacent positions share their keys.
std::vector<wavegraph::Tile> tiles_of(const wavegraph::Rows& rows) {
  std::vector<wavegraph::Tile> tiles;
  for (int32_t row = 0; row < rows.rows; row++) {
    if (rows.page[row] == rows.scratch_page) continue;
    bool joins = !tiles.empty() && tiles.back().row + tiles.back().rows == row && tiles.back().rows < wavegraph::kTileRows &&
                 rows.slot[row] == rows.slot[row - 1] && rows.depth[row] == rows.depth[row - 1] &&
                 rows.pos[row] == rows.pos[row - 1] + 1;
    if (joins)
      tiles.back().rows++;
    else
      tiles.push_back({row, 1});
  }
  return tiles;
}

void attention(const Tensor& out, const Tensor& qkv, const Tensor& k, const Tensor& v, const Tensor& page_table,
               const Tensor& row_slot, const Tensor& row_pos, const Tensor& row_depth, const Tensor& row_page,
               int64_t layer, int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(qkv, "qkv");
  check_rows(qkv, "qkv", dtype, rows, {-1, -1});
  wavegraph::Cache cache = cache_of(k, v, dtype, layer);
  int64_t heads = query_heads(qkv.size(1), cache), size = heads * cache.head_dim;
  check_rows(out, "out", dtype, rows, {-1, size});
  Table places(page_table, "page_table");
  wavegraph::Rows where{ints(row_slot, "row_slot", rows),
                        ints(row_pos, "row_pos", rows),
                        ints(row_depth, "row_depth", rows),
                        ints(row_page, "row_page", rows),
                        nullptr,
                        rows,
                        (int32_t)k.size(0) - 1};
  for (int64_t row = 0; row < rows; row++)
    if (where.page[row] == where.scratch_page)
      std::memset((char*)out.mutable_data_ptr() + row * size * out.element_size(), 0, size * out.element_size());
  std::vector<wavegraph::Tile> tiles = tiles_of(where);
  wavegraph::Attention args{out.mutable_data_ptr(), qkv.const_data_ptr(), heads,      places.data,
                            places.width,           tiles.data(),         (int64_t)tiles.size()};
  kernels_of(isa).attention(args, where, cache, type_of(dtype), threads());
}

void scatter_gate(const Tensor& h, const Tensor& hidden, const Tensor& gate, const Tensor& gate_weight,
                  const Tensor& gate_bias, const Tensor& row_depth, const Tensor& row_page, const Tensor& row_offset,
                  int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(h, "h");
  check_rows(h, "h", dtype, rows, {-1, -1});
  check(hidden, "hidden", dtype, {-1, -1, h.size(1)});
  check(gate, "gate", at::kFloat, {hidden.size(0), hidden.size(1), -1});
  check(gate_weight, "gate_weight", dtype, {h.size(1)});
  check(gate_bias, "gate_bias", dtype, {1});
  wavegraph::Rows where{nullptr,
                        nullptr,
                        ints(row_depth, "row_depth", rows),
                        ints(row_page, "row_page", rows),
                        ints(row_offset, "row_offset", rows),
                        rows,
                        (int32_t)hidden.size(0) - 1};
  wavegraph::ScatterGate args{h.const_data_ptr(),
                              hidden.mutable_data_ptr(),
                              gate_weight.const_data_ptr(),
                              gate_bias.const_data_ptr(),
                              gate.mutable_data_ptr<float>(),
                              h.size(1),
                              hidden.size(1),
                              gate.size(2)};
  kernels_of(isa).scatter_gate(args, where, type_of(dtype), threads());
}

void draw_greedy(const Tensor& logits, const Tensor& coda_token, const Tensor& token_table, const Tensor& coda_left,
                 const Tensor& coda_slot, const Tensor& coda_pos, int64_t rows, int64_t isa) {
  at::ScalarType dtype = model_dtype(logits, "logits");
  check_rows(logits, "logits", dtype, rows, {-1, -1});
  check_rows(coda_token, "coda_token", at::kInt, rows, {-1});
  Table tokens(token_table, "token_table");
  const int32_t *slot = ints(coda_slot, "coda_slot", rows), *pos = ints(coda_pos, "coda_pos", rows);
  const int32_t* left = ints(coda_left, "coda_left", rows);
  int32_t* token = coda_token.mutable_data_ptr<int32_t>();
  kernels_of(isa).argmax(token, logits.const_data_ptr(), rows, logits.size(1), type_of(dtype), threads());
  for (int64_t row = 0; row < rows; row++) {
    if (left[row] == 1)
      tokens.at(slot[row], (int64_t)pos[row] + 1, "coda row") = token[row];
    else
      token[row] = -1;
  }
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.push_back(isa.name);
  return names;
}

// Floats per vector, by which weights are packed; 0 if these kernels cannot run here.
int64_t lanes(int64_t isa) {
  TORCH_CHECK(isa >= 0 && isa < kIsaCount, "isa: must be in 0..", kIsaCount - 1, ", got ", isa);
  return usable(kIsas[isa]) ? kIsas[isa].kernels->lanes : 0;
}

}  // namespace

TORCH_LIBRARY(wavegraph, m) {
  m.def("isas", isas);
  m.def("lanes", lanes);
  m.def(
      "update_tables(Tensor token_slot, Tensor token_pos, Tensor token_id, Tensor page_slot, Tensor page_index, "
      "Tensor page_id, Tensor param_slot, Tensor param_rows, Tensor(a!) token_table, Tensor(b!) page_table, "
      "Tensor(c!) params) -> ()");
  m.def(
      "prepare(Tensor span_slot, Tensor span_start, Tensor span_count, Tensor span_depth, Tensor page_table, "
      "Tensor(a!) row_slot, Tensor(b!) row_pos, Tensor(c!) row_depth, Tensor(d!) row_page, Tensor(e!) row_offset, "
      "int rows, int pages, int page_size, int depths) -> ()");
  m.def(
      "gather(Tensor(a!) out, Tensor embedding, Tensor hidden, Tensor token_table, Tensor row_slot, Tensor row_pos, "
      "Tensor row_depth, Tensor row_page, Tensor row_offset, int rows) -> ()");
  m.def("coda_gather(Tensor(a!) out, Tensor hidden, Tensor page_table, Tensor coda_slot, Tensor coda_pos, int rows) -> ()");
  m.def("linear(Tensor(a!) out, Tensor x, Tensor weight, int rows, int isa) -> ()");
  m.def("linear_silu_mul(Tensor(a!) out, Tensor x, Tensor weight, int rows, int isa) -> ()");
  m.def("norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, int rows, int isa) -> ()");
  m.def(
      "residual_norm(Tensor(a!) x, Tensor(b!) out, Tensor branch, Tensor branch_weight, Tensor next_weight, float eps, "
      "int rows, int isa) -> ()");
  m.def(
      "rope_write(Tensor(a!) qkv, Tensor(b!) k, Tensor(c!) v, Tensor cos, Tensor sin, Tensor row_pos, Tensor row_depth, "
      "Tensor row_page, Tensor row_offset, int layer, int rows, int isa) -> ()");
  m.def(
      "attention(Tensor(a!) out, Tensor qkv, Tensor k, Tensor v, Tensor page_table, Tensor row_slot, Tensor row_pos, "
      "Tensor row_depth, Tensor row_page, int layer, int rows, int isa) -> ()");
  m.def(
      "scatter_gate(Tensor h, Tensor(a!) hidden, Tensor(b!) gate, Tensor gate_weight, Tensor gate_bias, Tensor row_depth, "
      "Tensor row_page, Tensor row_offset, int rows, int isa) -> ()");
  m.def(
      "leave(Tensor(a!) coda_left, Tensor gate, Tensor page_table, Tensor params, Tensor coda_slot, Tensor coda_pos, "
      "Tensor coda_depth, Tensor coda_action, int threshold_column, int rows) -> ()");
  m.def(
      "draw_greedy(Tensor logits, Tensor(a!) coda_token, Tensor(b!) token_table, Tensor coda_left, Tensor coda_slot, "
      "Tensor coda_pos, int rows, int isa) -> ()");
  m.def(
      "copy_exits(Tensor(a!) k, Tensor(b!) v, Tensor page_table, Tensor params, Tensor coda_left, Tensor coda_slot, "
      "Tensor coda_pos, Tensor coda_depth, Tensor coda_action, int copy_column, int rows) -> ()");
}

TORCH_LIBRARY_IMPL(wavegraph, CPU, m) {
  m.impl("update_tables", update_tables);
  m.impl("prepare", prepare);
  m.impl("gather", gather);
  m.impl("coda_gather", coda_gather);
  m.impl("linear", linear);
  m.impl("linear_silu_mul", linear_silu_mul);
  m.impl("norm", norm);
  m.impl("residual_norm", residual_norm);
  m.impl("rope_write", rope_write);
  m.impl("attention", attention);
  m.impl("scatter_gate", scatter_gate);
  m.impl("leave", leave);
  m.impl("draw_greedy", draw_greedy);
  m.impl("copy_exits", copy_exits);
}
