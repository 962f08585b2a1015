// The operators that compute nothing: table updates, expansion of spans to rows, gathering of rows.
//
// What they take from tables is checked for range, as those values become addresses here and in later operators.
#pragma once

#include <cstring>

#include "checks.h"

namespace {

struct Table {
  int32_t* data;
  int64_t slots, width;

  Table(const Tensor& t, const char* name) {
    check(t, name, at::kInt, {-1, -1});
    data = t.mutable_data_ptr<int32_t>();
    slots = t.size(0);
    width = t.size(1);
  }
  int32_t& at(int64_t slot, int64_t column, const char* what) const {
    TORCH_CHECK(slot >= 0 && slot < slots && column >= 0 && column < width, what, ": (slot ", slot, ", ", column,
                ") lies outside a table of ", slots, " x ", width);
    return data[slot * width + column];
  }
};

int64_t page_in(int64_t page, int64_t pages) {
  TORCH_CHECK(page >= 0 && page < pages, "page_table: page ", page, " lies outside a pool of ", pages);
  return page;
}

// Stores values[i] at (slot[i], column[i]).
void update(const Table& table, const Tensor& slot, const Tensor& column, const Tensor& value, const char* what) {
  int64_t count = slot.numel();
  const int32_t *slots = ints(slot, what, count), *columns = ints(column, what, count);
  const int32_t* values = ints(value, what, count);
  for (int64_t i = 0; i < count; i++) table.at(slots[i], columns[i], what) = values[i];
}

void update_tables(const Tensor& token_slot, const Tensor& token_pos, const Tensor& token_id, const Tensor& page_slot,
                   const Tensor& page_index, const Tensor& page_id, const Tensor& param_slot, const Tensor& param_rows,
                   const Tensor& token_table, const Tensor& page_table, const Tensor& params) {
  update(Table(token_table, "token_table"), token_slot, token_pos, token_id, "token updates");
  update(Table(page_table, "page_table"), page_slot, page_index, page_id, "page updates");
  Table parameters(params, "params");
  int64_t count = param_slot.numel();
  const int32_t* slots = ints(param_slot, "param_slot", count);
  check(param_rows, "param_rows", at::kInt, {count, parameters.width});
  const int32_t* rows = param_rows.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; i++)
    std::memcpy(&parameters.at(slots[i], 0, "parameter updates"), rows + i * parameters.width, parameters.width * 4);
}

// Every page up to a span's last row is checked for range: attention will read them all.
void prepare(const Tensor& span_slot, const Tensor& span_start, const Tensor& span_count, const Tensor& span_depth,
             const Tensor& page_table, const Tensor& row_slot, const Tensor& row_pos, const Tensor& row_depth,
             const Tensor& row_page, const Tensor& row_offset, int64_t rows, int64_t pages, int64_t page_size,
             int64_t depths) {
  TORCH_CHECK(pages >= 1 && page_size >= 1, "pages, page_size: must be positive, got ", pages, " and ", page_size);
  Table places(page_table, "page_table");
  int32_t* fields[5];
  const Tensor* tensors[] = {&row_slot, &row_pos, &row_depth, &row_page, &row_offset};
  for (int i = 0; i < 5; i++) {
    check_rows(*tensors[i], "row fields", at::kInt, rows, {-1});
    fields[i] = tensors[i]->mutable_data_ptr<int32_t>();
  }
  auto set_row = [&](int64_t row, int64_t slot, int64_t pos, int64_t depth, int64_t page) {
    int64_t values[] = {slot, pos, depth, page, pos % page_size};
    for (int i = 0; i < 5; i++) fields[i][row] = (int32_t)values[i];
  };
  int64_t row = 0, spans = span_slot.numel();
  const int32_t *slot = ints(span_slot, "span_slot", spans), *start = ints(span_start, "span_start", spans);
  const int32_t *count = ints(span_count, "span_count", spans), *depth = ints(span_depth, "span_depth", spans);
  for (int64_t span = 0; span < spans; span++) {
    if (count[span] == 0) continue;
    int64_t end = (int64_t)start[span] + count[span];
    TORCH_CHECK(count[span] > 0 && count[span] <= rows - row, "span_count: spans hold more than the ", rows,
                " rows of the bucket, or less than none");
    TORCH_CHECK(start[span] >= 0, "span_start: must be at least 0, got ", start[span]);
    TORCH_CHECK(depth[span] >= 0 && depth[span] < depths, "span_depth: must be in 0..", depths - 1, ", got ", depth[span]);
    for (int64_t block = 0; block * page_size < end; block++)
      page_in(places.at(slot[span], block, "span"), pages);
    for (int64_t pos = start[span]; pos < end; pos++)
      set_row(row++, slot[span], pos, depth[span], places.at(slot[span], pos / page_size, "span"));
  }
  for (; row < rows; row++) set_row(row, places.slots - 1, 0, 0, pages - 1);
}

void gather(const Tensor& out, const Tensor& embedding, const Tensor& hidden, const Tensor& token_table,
            const Tensor& row_slot, const Tensor& row_pos, const Tensor& row_depth, const Tensor& row_page,
            const Tensor& row_offset, int64_t rows) {
  at::ScalarType dtype = model_dtype(out, "out");
  check_rows(out, "out", dtype, rows, {-1, -1});
  int64_t size = out.size(1), bytes = size * out.element_size(), pages = hidden.size(0), page_size = hidden.size(1);
  check(embedding, "embedding", dtype, {-1, size});
  check(hidden, "hidden", dtype, {-1, -1, size});
  Table tokens(token_table, "token_table");
  const int32_t *slot = ints(row_slot, "row_slot", rows), *pos = ints(row_pos, "row_pos", rows);
  const int32_t *depth = ints(row_depth, "row_depth", rows), *page = ints(row_page, "row_page", rows);
  const int32_t* offset = ints(row_offset, "row_offset", rows);
  char* to = (char*)out.mutable_data_ptr();
  for (int64_t row = 0; row < rows; row++, to += bytes) {
    if (page[row] == pages - 1) {
      std::memset(to, 0, bytes);
    } else if (depth[row] == 0) {
      int64_t token = tokens.at(slot[row], pos[row], "row");
      TORCH_CHECK(token >= 0 && token < embedding.size(0), "token_table: token ", token,
                  " lies outside a vocabulary of ", embedding.size(0));
      std::memcpy(to, (const char*)embedding.const_data_ptr() + token * bytes, bytes);
    } else {
      std::memcpy(to, (const char*)hidden.const_data_ptr() + (page[row] * page_size + offset[row]) * bytes, bytes);
    }
  }
}

// Page of a coda row's position.
int64_t page_of(const Table& places, int64_t slot, int64_t pos, int64_t pages, int64_t page_size) {
  return page_in(places.at(slot, pos >= 0 ? pos / page_size : -1, "coda row"), pages);
}

void coda_gather(const Tensor& out, const Tensor& hidden, const Tensor& page_table, const Tensor& coda_slot,
                 const Tensor& coda_pos, int64_t rows) {
  at::ScalarType dtype = model_dtype(out, "out");
  check_rows(out, "out", dtype, rows, {-1, -1});
  int64_t size = out.size(1), bytes = size * out.element_size(), pages = hidden.size(0), page_size = hidden.size(1);
  check(hidden, "hidden", dtype, {-1, -1, size});
  Table places(page_table, "page_table");
  const int32_t *slot = ints(coda_slot, "coda_slot", rows), *pos = ints(coda_pos, "coda_pos", rows);
  char* to = (char*)out.mutable_data_ptr();
  for (int64_t row = 0; row < rows; row++, to += bytes) {
    if (slot[row] == places.slots - 1) {
      std::memset(to, 0, bytes);
      continue;
    }
    int64_t page = page_of(places, slot[row], pos[row], pages, page_size);
    std::memcpy(to, (const char*)hidden.const_data_ptr() + (page * page_size + pos[row] % page_size) * bytes, bytes);
  }
}

}  // namespace
