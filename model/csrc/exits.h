// Who leaves the loop, and what an exit leaves behind for the deeper depths.
#pragma once

#include <cmath>

#include "tables.h"

namespace {

// As `wavegraph.model.sampling.Action`.
enum Action { kSample, kGate, kScore, kReplay };

// A position's gate logits of depths 0..depth, against its request's threshold; float32 but for the sigmoid.
bool gate_lets_go(const float* logits, int64_t depth, float threshold) {
  float stayed = 1.0f, mass = 0.0f;
  for (int64_t j = 0; j <= depth; j++) {
    float leaves = (float)(1.0 / (1.0 + std::exp(-(double)logits[j])));
    mass += leaves * stayed;
    stayed *= 1.0f - leaves;
  }
  return mass >= threshold;
}

void leave(const Tensor& coda_left, const Tensor& gate, const Tensor& page_table, const Tensor& params,
           const Tensor& coda_slot, const Tensor& coda_pos, const Tensor& coda_depth, const Tensor& coda_action,
           int64_t threshold_column, int64_t rows) {
  check_rows(coda_left, "coda_left", at::kInt, rows, {-1});
  check(gate, "gate", at::kFloat, {-1, -1, -1});
  int64_t pages = gate.size(0), page_size = gate.size(1), depths = gate.size(2);
  Table places(page_table, "page_table"), parameters(params, "params");
  const int32_t *slot = ints(coda_slot, "coda_slot", rows), *pos = ints(coda_pos, "coda_pos", rows);
  const int32_t *depth = ints(coda_depth, "coda_depth", rows), *action = ints(coda_action, "coda_action", rows);
  int32_t* left = coda_left.mutable_data_ptr<int32_t>();
  for (int64_t row = 0; row < rows; row++) {
    left[row] = action[row] == kSample;
    if (action[row] != kGate) continue;
    TORCH_CHECK(depth[row] >= 0 && depth[row] < depths, "coda_depth: must be in 0..", depths - 1, ", got ", depth[row]);
    int64_t page = page_of(places, slot[row], pos[row], pages, page_size);
    const float* logits = gate.const_data_ptr<float>() + (page * page_size + pos[row] % page_size) * depths;
    float threshold;
    std::memcpy(&threshold, &parameters.at(slot[row], threshold_column, "parameters"), sizeof threshold);
    left[row] = depth[row] == depths - 1 || gate_lets_go(logits, depth[row], threshold);
  }
}

void copy_exits(const Tensor& k, const Tensor& v, const Tensor& page_table, const Tensor& params,
                const Tensor& coda_left, const Tensor& coda_slot, const Tensor& coda_pos, const Tensor& coda_depth,
                const Tensor& coda_action, int64_t copy_column, int64_t rows) {
  at::ScalarType dtype = model_dtype(k, "k");
  check(k, "k", dtype, {-1, -1, -1, -1, -1, -1});
  check(v, "v", dtype, k.sizes());
  Table places(page_table, "page_table"), parameters(params, "params");
  const int32_t *left = ints(coda_left, "coda_left", rows), *action = ints(coda_action, "coda_action", rows);
  const int32_t *slot = ints(coda_slot, "coda_slot", rows), *pos = ints(coda_pos, "coda_pos", rows);
  const int32_t* depth = ints(coda_depth, "coda_depth", rows);
  int64_t depths = k.size(1), layers = k.size(2), page_size = k.size(3);
  int64_t position = k.size(4) * k.size(5) * k.element_size(), layer_bytes = page_size * position;
  char* planes[] = {(char*)k.mutable_data_ptr(), (char*)v.mutable_data_ptr()};
  for (int64_t row = 0; row < rows; row++) {
    bool wanted = parameters.at(slot[row], copy_column, "parameters") != 0;
    if (!wanted || !(left[row] == 1 || action[row] == kReplay)) continue;
    TORCH_CHECK(depth[row] >= 0 && depth[row] < depths, "coda_depth: must be in 0..", depths - 1, ", got ", depth[row]);
    int64_t page = page_of(places, slot[row], pos[row], k.size(0), page_size), offset = pos[row] % page_size * position;
    for (char* plane : planes) {
      char* from = plane + (page * depths + depth[row]) * layers * layer_bytes + offset;
      for (int64_t to = depth[row] + 1; to < depths; to++)
        for (int64_t layer = 0; layer < layers; layer++)
          std::memcpy(plane + ((page * depths + to) * layers + layer) * layer_bytes + offset, from + layer * layer_bytes,
                      position);
    }
  }
}

}  // namespace
