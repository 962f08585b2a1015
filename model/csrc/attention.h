// Causal attention over paged keys and values, softmax in float32.
//
// A tile (some rows of one slot and depth at adjacent positions) with one KV head is the unit of work of a thread.
// Keys are taken in blocks that start at multiples of kBlock, with an online softmax per query: a block's keys and
// values are packed as weights are, and both products are those of linear.h. What a query adds up is set by its own
// position: it takes `live` keys of each block, in order, whoever else is in the tile. In bfloat16 probabilities
// are rounded to it before they meet the values, as the reference does.
#pragma once

#include "linear.h"
#include "rowwise.h"

namespace {

using wavegraph::kMaxHeadDim;

constexpr int kBlock = 64;
constexpr int kPanel = 2 * W;
constexpr int kQueries = wavegraph::kTileRows;

alignas(64) const char kZeros[kMaxHeadDim * sizeof(float)] = {};

// Where a block's keys and values lie in the cache.
template <class T>
struct Places {
  const T *keys[kBlock], *values[kBlock];
};

template <class T>
struct Scratch {
  Places<T> places[2];  // of this block and the next
  int64_t live[kQueries];                  // keys of the block that a query sees
  float fade[kQueries], most[kQueries];
  V total[kQueries];
  alignas(64) T packed_keys[kBlock * kMaxHeadDim];    // panels of keys: [words of a key][kPanel]
  alignas(64) T packed_values[kBlock * kMaxHeadDim];  // panels of features: [keys][kPanel], keys in pairs if bf16
  alignas(64) T q[kQueries * kMaxHeadDim];
  alignas(64) T p[kQueries * kBlock];
  alignas(64) float scores[kQueries * kBlock];
  alignas(64) float out[kQueries * kMaxHeadDim];
};

// Rows become columns. Each round interleaves the first half of the rows with the second.
WG_INLINE void transpose(VU (&v)[W]) {
  VU low, high, mixed[W];
  for (int i = 0; i < W; i++) {
    low[i] = i / 2 + (i % 2) * W;
    high[i] = i / 2 + W / 2 + (i % 2) * W;
  }
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) {
      mixed[2 * i] = __builtin_shuffle(v[i], v[i + W / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(v[i], v[i + W / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) v[i] = mixed[i];
  }
}

// Points at positions [start, start + count) of a slot's plane, and asks for what lies there; the rest of the last
// panel of keys is zeros.
template <class T>
void find_block(Places<T>& places, const wavegraph::Cache& cache, const int32_t* pages, int64_t depth, int64_t kv_head,
                int64_t start, int count) {
  int64_t block = start / cache.page_size, offset = start % cache.page_size;
  int64_t stride = cache.kv_heads * cache.head_dim, bytes = cache.head_dim * sizeof(T);
  int64_t at = cache_offset(cache, pages[block], depth, offset) + kv_head * cache.head_dim;
  for (int j = 0; j < count; j++) {
    places.keys[j] = (const T*)cache.k + at;
    places.values[j] = (const T*)cache.v + at;
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch((const char*)places.keys[j] + line, 0, 2);
      __builtin_prefetch((const char*)places.values[j] + line, 0, 2);
    }
    at += stride;
    if (++offset == cache.page_size && j + 1 < count) {
      offset = 0;
      at = cache_offset(cache, pages[++block], depth, 0) + kv_head * cache.head_dim;
    }
  }
  for (int j = count; j % kPanel; j++) places.keys[j] = (const T*)kZeros;
}

template <class T>
void pack_keys(Scratch<T>& s, const T* const* keys, int d, int count) {
  int words = d * (int)sizeof(T) / 4;
  for (int first = 0; first < (count + kPanel - 1) / kPanel * kPanel; first += W) {
    uint32_t* to = (uint32_t*)s.packed_keys + first / kPanel * kPanel * words + first % kPanel;
    for (int at = 0; at < words; at += W) {
      VU v[W];
      int n = least(W, words - at);
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) v[j] = load_words((const uint32_t*)keys[first + j] + at, n);
      transpose(v);
      for (int i = 0; i < n; i++) memcpy(to + (at + i) * kPanel, &v[i], sizeof v[i]);
    }
  }
}

void pack_values(Scratch<float>& s, const float* const* values, int d, int count) {
  for (int j = 0; j < count; j++)
    for (int at = 0; at < d; at += W)
      store(s.packed_values + at / kPanel * kPanel * kBlock + j * kPanel + at % kPanel, load(values[j] + at, least(W, d - at)));
}
void pack_values(Scratch<bf16>& s, const bf16* const* values, int d, int count) {
  for (int j = 0; j < count; j += 2)
    for (int at = 0; at < d; at += W) {
      int n = least(W, d - at);
      VU words = (VU)load(values[j] + at, n) >> 16;
      if (j + 1 < count) words |= (VU)load(values[j + 1] + at, n);
      memcpy(s.packed_values + at / kPanel * kPanel * kBlock + j * kPanel + at % kPanel * 2, &words, sizeof words);
    }
}

// Scores of queries [first, first + M) with the first `count` keys.
template <class T, int M>
void score(Scratch<T>& s, int first, int d, int count) {
  for (int at = 0; at < count; at += kPanel) {
    V c[M][2] = {};
    panel_sums<M>(c, s.q + first * d, d, d, s.packed_keys + at * d);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      store(s.scores + (first + m) * kBlock + at, c[m][0]);
      store(s.scores + (first + m) * kBlock + at + W, c[m][1]);
    }
  }
}

// Turns a query's scores into probabilities, as yet to be divided by their total.
template <class T>
void soften(Scratch<T>& s, int query, float scale) {
  float* scores = s.scores + query * kBlock;
  int live = (int)s.live[query];
  V most = splat(-__builtin_inff());
  VI lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int j = 0; j < live; j += W) {
    V x = load(scores + j) * scale;
    x = lane < live - j ? x : splat(-__builtin_inff());
    most = x > most ? x : most;
    store(scores + j, x);
  }
  float block_most = largest(most), before = s.most[query];
  float next = block_most > before ? block_most : before;
  s.most[query] = next;
  s.fade[query] = exponential(splat(before - next))[0];
  V total = s.total[query] * s.fade[query];
  for (int j = 0; j < live; j += W) {
    V p = rounded<T>(exponential(load(scores + j) - next));
    total += p;
    store(s.p + query * kBlock + j, p);
  }
  s.total[query] = total;
}

// out = out * fade + p . values over keys [from, to), for queries [first, first + M).
template <class T, int M>
void add_values(Scratch<T>& s, int first, int d, int from, int to, bool fading) {
  for (int at = 0; at < d; at += kPanel) {
    V c[M][2];
    float* out = s.out + first * kMaxHeadDim + at;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      float fade = fading ? s.fade[first + m] : 1.0f;
      c[m][0] = load(out + m * kMaxHeadDim) * fade;
      c[m][1] = load(out + m * kMaxHeadDim + W) * fade;
    }
    panel_sums<M>(c, s.p + first * kBlock + from, kBlock, to - from, s.packed_values + at * kBlock + from * kPanel);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      store(out + m * kMaxHeadDim, c[m][0]);
      store(out + m * kMaxHeadDim + W, c[m][1]);
    }
  }
}

// Queries [first, last), of which a later one sees no fewer keys, take a block.
template <class T>
void take_block(Scratch<T>& s, int first, int last, int d, float scale) {
  for_tiles(first, last, [&]<int M>(int64_t query) {
    score<T, M>(s, (int)query, d, (int)s.live[query + M - 1]);
    for (int i = 0; i < M; i++) soften(s, (int)query + i, scale);
    // Together as far as all of them see (whole pairs), then each on its own: its sum goes on in order.
    int common = (int)s.live[query] & ~1;
    add_values<T, M>(s, (int)query, d, 0, common, true);
    for (int i = 0; i < M; i++)
      if (s.live[query + i] > common) add_values<T, 1>(s, (int)query + i, d, common, (int)s.live[query + i], false);
  });
}

// All queries of a tile that read one KV head, kQueries at a time, in row order.
template <class T>
void attend_tile(const wavegraph::Attention& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache,
                 wavegraph::Tile tile, int64_t kv_head) {
  Scratch<T> s;
  int d = (int)cache.head_dim;
  int64_t group = a.heads / cache.kv_heads, q_size = a.heads * d, row_size = q_size + 2 * cache.kv_heads * d;
  const int32_t* pages = a.page_table + rows.slot[tile.row] * a.pages_per_slot;
  for (int64_t begin = 0; begin < tile.rows * group; begin += kQueries) {
    int count = (int)least<int64_t>(kQueries, tile.rows * group - begin);
    auto row_of = [&](int i) { return tile.row + (begin + i) / group; };
    auto feature_of = [&](int i) { return (kv_head * group + (begin + i) % group) * d; };
    for (int i = 0; i < count; i++) {
      memcpy(s.q + i * d, (const T*)a.qkv + row_of(i) * row_size + feature_of(i), d * sizeof(T));
      s.most[i] = -__builtin_inff();
      s.total[i] = V{};
    }
    memset(s.out, 0, count * kMaxHeadDim * sizeof(float));
    int64_t end = rows.pos[row_of(count - 1)] + 1;  // the last row sees furthest
    auto present_at = [&](int64_t start) { return (int)least<int64_t>(kBlock, end - start); };
    find_block(s.places[0], cache, pages, rows.depth[tile.row], kv_head, 0, present_at(0));
    for (int64_t start = 0; start < end; start += kBlock) {
      const Places<T>& here = s.places[start / kBlock % 2];
      int64_t next = start + kBlock;
      if (next < end)
        find_block(s.places[next / kBlock % 2], cache, pages, rows.depth[tile.row], kv_head, next, present_at(next));
      pack_keys(s, here.keys, d, present_at(start));
      pack_values(s, here.values, d, present_at(start));
      int first = 0;
      for (int i = 0; i < count; i++) {
        s.live[i] = least<int64_t>(kBlock, rows.pos[row_of(i)] + 1 - start);
        if (s.live[i] <= 0) first = i + 1;
      }
      take_block(s, first, count, d, 1.0f / __builtin_sqrtf((float)d));
    }
    for (int i = 0; i < count; i++) {
      T* out = (T*)a.out + row_of(i) * q_size + feature_of(i);
      float inverse = 1.0f / sum(s.total[i]);
      for (int at = 0; at < d; at += W)
        store(out + at, load(s.out + i * kMaxHeadDim + at) * inverse, least(W, d - at));
    }
  }
}

template <class T>
void attention_typed(const wavegraph::Attention& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache,
                     int threads) {
  int64_t items = a.tile_count * cache.kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && items > 1)
  for (int64_t item = 0; item < items; item++)
    attend_tile<T>(a, rows, cache, a.tiles[item / cache.kv_heads], item % cache.kv_heads);
}

void attention(const wavegraph::Attention& a, const wavegraph::Rows& rows, const wavegraph::Cache& cache,
               wavegraph::Type type, int threads) {
  type == wavegraph::kFloat32 ? attention_typed<float>(a, rows, cache, threads)
                              : attention_typed<bf16>(a, rows, cache, threads);
}

}  // namespace
