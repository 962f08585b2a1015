// Checks of the operators' arguments: a wrong dtype, shape or stride would corrupt memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace {

using at::Tensor;

void check(const Tensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == dtype && t.is_contiguous(), name, ": needs a contiguous ",
              dtype, " tensor on the CPU, got ", t.scalar_type(), " on ", t.device(), " with strides ", t.strides());
  TORCH_CHECK(t.dim() == (int64_t)shape.size(), name, ": needs ", shape.size(), " dimensions, got ", t.dim());
  for (int64_t i = 0; i < t.dim(); i++)
    TORCH_CHECK(shape[i] < 0 || t.size(i) == shape[i], name, ": dimension ", i, " must be ", shape[i], ", got ", t.size(i));
}

void check_rows(const Tensor& t, const char* name, at::ScalarType dtype, int64_t rows, at::IntArrayRef shape) {
  check(t, name, dtype, shape);
  TORCH_CHECK(rows >= 1 && rows <= t.size(0), name, ": holds ", t.size(0), " rows, asked for ", rows);
}

at::ScalarType model_dtype(const Tensor& t, const char* name) {
  at::ScalarType dtype = t.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, name, ": needs float32 or bfloat16, got ", dtype);
  return dtype;
}

wavegraph::Type type_of(at::ScalarType dtype) { return dtype == at::kFloat ? wavegraph::kFloat32 : wavegraph::kBFloat16; }

const int32_t* ints(const Tensor& t, const char* name, int64_t rows) {
  check_rows(t, name, at::kInt, rows, {-1});
  return t.const_data_ptr<int32_t>();
}

}  // namespace
