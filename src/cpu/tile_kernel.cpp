// FlashAttention-2's forward on a CPU: one task is a block of query rows; it walks the key tiles
// with an online softmax and divides once at the end. Compiled once per instruction-set level.
//
// The vector lanes are query rows. Scores are kept transposed, S^T [key][row], so that the row
// maximum, the row sum and the rescaling never cross lanes, and K and V are read where they lie, a
// broadcast scalar at a time. Q^T and O^T live in scratch; they are transposed once per task.
#include "cpu/level.h"
#include "cpu/simd.h"

namespace fastattn::cpu {
namespace {

// A register tile is kBroadcasts keys (or value columns) by up to kVectors vectors of rows: enough
// independent sums to hide the latency of a multiply-add, few enough to stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBroadcasts = 8;  // of 32 registers: 24 sums, 3 vectors of rows, the broadcasts
constexpr int kVectors = 3;
#elif defined(__AVX2__)
constexpr int kBroadcasts = 4;  // of 16 registers: 12 sums, 3 vectors of rows, 1 broadcast
constexpr int kVectors = 3;
#else
constexpr int kBroadcasts = 4;  // of 16 registers: 8 sums, 2 vectors of rows, without fused
constexpr int kVectors = 2;     // multiply-add a product each
#endif
constexpr int kGroupRows = kVectors * kLanes;
constexpr int kColumnStep = kLanes > kBroadcasts ? kLanes : kBroadcasts;  // of O^T: both tile it

constexpr int kTileKeys = 64;  // kBlockKV: S^T of 48 rows is 12 KiB
constexpr int kDepth = 64;  // of the head dim per pass over a tile: Q^T of 48 rows is 12 KiB, and
                            // short sums that are then added round less than one long sum
constexpr std::int64_t kMaxStrideBytes = 2048;  // longer rows are gathered: they alias in L1
static_assert(kTileKeys % kBroadcasts == 0);
constexpr int kFoldTiles = 8;  // what so many tiles add up to goes into a more exact sum

constexpr std::int64_t round_up(std::int64_t x, std::int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Sums over all tiles, each with what it lost to rounding. After many tiles one more may weigh less
// than half a unit of the sum's last place.
struct Total {
  float *sum, *lost;
};

// What a task owns of kGroupRows rows. Lanes behind the last row repeat it and are never written
// out.
struct Group {
  int rows, vectors;
  float* q;        // [D, vectors * kLanes]
  float* row_max;  // [vectors * kLanes], of the scaled scores, in units of ln 2
  // Since the last fold:
  float* out;      // [Dv, vectors * kLanes], not yet divided by row_sum
  float* row_sum;  // [vectors * kLanes]
  float* shrink;   // [vectors * kLanes]: what the totals are to be multiplied by
  // Up to it, unset before the first:
  Total out_total, row_sum_total;
  bool is_folded;
  std::int32_t *first, *last;  // [vectors * kLanes]: a row sees keys first <= j < last
  int first_min, first_max, last_min, last_max;
};

// Keys begin <= j < end, at least one and at most kTileKeys, and where they lie as fp32.
struct Tile {
  int begin, end;
  const float* k;  // of key `begin`
  const float* v;
  std::int64_t k_stride, v_stride;
};

// Hands out 64-byte aligned pieces; from address 0 it only measures.
struct Scratch {
  std::uintptr_t base;
  std::size_t used = 0;

  template <class T>
  T* take(std::int64_t count) {
    T* pointer = reinterpret_cast<T*>(base + used);
    used += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(T)), 64));
    return pointer;
  }
};

constexpr int kMaxGroups = 4;

struct Workspace {
  Group groups[kMaxGroups];
  float* scores;  // [kTileKeys, kGroupRows]: S^T, then P^T
  float* k;       // [kTileKeys, D]: a tile that can't be read in place
  float* v;       // [kTileKeys, Dv rounded up to kBroadcasts]
};

Workspace lay_out(const Call& call, Scratch& scratch) {
  const ForwardParams& p = call.params;
  Workspace w;
  const int groups = (call.rows_per_task + kGroupRows - 1) / kGroupRows;
  for (int i = 0; i < groups; ++i) {
    Group& group = w.groups[i];
    group.q = scratch.take<float>(round_up(p.head_dim, kLanes) * kGroupRows);
    const std::int64_t out_size = round_up(p.head_dim_v, kColumnStep) * kGroupRows;
    group.out = scratch.take<float>(out_size);
    group.row_max = scratch.take<float>(kGroupRows);
    group.row_sum = scratch.take<float>(kGroupRows);
    group.shrink = scratch.take<float>(kGroupRows);
    group.out_total = {.sum = scratch.take<float>(out_size), .lost = scratch.take<float>(out_size)};
    group.row_sum_total = {.sum = scratch.take<float>(kGroupRows),
                           .lost = scratch.take<float>(kGroupRows)};
    group.first = scratch.take<std::int32_t>(kGroupRows);
    group.last = scratch.take<std::int32_t>(kGroupRows);
  }
  w.scores = scratch.take<float>(kTileKeys * kGroupRows);
  w.k = scratch.take<float>(std::int64_t{kTileKeys} * p.head_dim);
  w.v = scratch.take<float>(kTileKeys * round_up(p.head_dim_v, kBroadcasts));
  return w;
}

std::size_t scratch_bytes(const Call& call) {
  Scratch scratch{0};
  lay_out(call, scratch);
  return scratch.used;
}

// S^T of kBroadcasts keys over `depth` of the head dim, added to what `s` holds where `add`, then
// times `factor`; raises `max`. A function of its own because its pointers need all the general
// registers, and because a rounded product must be what both the maximum and the exponential see.
// [key][row]
template <int kVecs>
__attribute__((noinline)) void score_keys(const float* q, const float* const (&keys)[kBroadcasts],
                                          int depth, bool add, float factor, float* s, float* max) {
  constexpr int kRow = kVecs * kLanes;
  Vec sum[kBroadcasts][kVecs];
  const float* k[kBroadcasts];
  FASTATTN_UNROLL
  for (int i = 0; i < kBroadcasts; ++i) {
    k[i] = keys[i];
    FASTATTN_UNROLL
    for (int x = 0; x < kVecs; ++x) sum[i][x] = Vec{};
  }
  for (std::int64_t d = 0; d < depth; ++d, q += kRow) {
    Vec row[kVecs];
    FASTATTN_UNROLL
    for (int x = 0; x < kVecs; ++x) row[x] = load(q + x * kLanes);
    FASTATTN_UNROLL
    for (int i = 0; i < kBroadcasts; ++i) {
      const Vec element = broadcast(k[i][d]);
      FASTATTN_UNROLL
      for (int x = 0; x < kVecs; ++x) sum[i][x] += element * row[x];
    }
  }
  if (add) {
    FASTATTN_UNROLL
    for (int i = 0; i < kBroadcasts; ++i) {
      FASTATTN_UNROLL
      for (int x = 0; x < kVecs; ++x) sum[i][x] += load(s + i * kRow + x * kLanes);
    }
  }
  FASTATTN_UNROLL
  for (int x = 0; x < kVecs; ++x) {
    Vec running = load(max + x * kLanes);
    FASTATTN_UNROLL
    for (int i = 0; i < kBroadcasts; ++i) {
      const Vec score = sum[i][x] * factor;
      store(s + i * kRow + x * kLanes, score);
      running = max_of(score, running);
    }
    store(max + x * kLanes, running);
  }
}

// Sets hidden scores to -inf and takes `max` anew from what is left.
template <int kVecs>
void hide_keys(const Group& group, const Tile& tile, float* scores, float* max) {
  constexpr int kRow = kVecs * kLanes;
  FASTATTN_UNROLL
  for (int x = 0; x < kVecs; ++x) {
    const IntVec first = load(group.first + x * kLanes);
    const IntVec last = load(group.last + x * kLanes);
    Vec running = broadcast(-kInfinity);
    for (int key = tile.begin; key < tile.end; ++key) {
      float* s = scores + (key - tile.begin) * kRow + x * kLanes;
      const IntVec visible = (first <= key) & (last > key);
      const Vec score = visible ? load(s) : broadcast(-kInfinity);
      store(s, score);
      running = max_of(score, running);
    }
    store(max + x * kLanes, running);
  }
}

// S^T = K Q^T for one tile, hidden scores -inf, and its largest score per row.
template <int kVecs>
void score_tile(const Group& group, const Tile& tile, bool masked, int head_dim, float scale_log2,
                float* scores, float* max) {
  constexpr int kRow = kVecs * kLanes;
  const int keys = tile.end - tile.begin;
  for (int d = 0; d < head_dim; d += kDepth) {
    const int depth = head_dim - d < kDepth ? head_dim - d : kDepth;
    const float factor = d + depth == head_dim ? scale_log2 : 1.0F;
    FASTATTN_UNROLL
    for (int x = 0; x < kVecs; ++x) store(max + x * kLanes, broadcast(-kInfinity));
    for (int j = 0; j < keys; j += kBroadcasts) {
      // Behind the tile's end the last key is scored again: no maximum changes, and no one reads
      // it.
      const float* k[kBroadcasts];
      FASTATTN_UNROLL
      for (int i = 0; i < kBroadcasts; ++i) {
        k[i] = tile.k + (j + i < keys ? j + i : keys - 1) * tile.k_stride + d;
      }
      score_keys<kVecs>(group.q + std::int64_t{d} * kRow, k, depth, d != 0, factor,
                        scores + j * kRow, max);
    }
  }
  if (masked) hide_keys<kVecs>(group, tile, scores, max);
}

// P^T = 2^(S^T - row_max) in place, row_sum, and by how much the older sums shrink.
template <int kVecs>
void soften_tile(const Group& group, int keys, float* scores, const float* max,
                 Vec (&shrink)[kVecs]) {
  constexpr int kRow = kVecs * kLanes;
  Vec row_max[kVecs];
  Vec row_sum[kVecs];
  FASTATTN_UNROLL
  for (int x = 0; x < kVecs; ++x) {
    const Vec old_max = load(group.row_max + x * kLanes);
    const Vec new_max = max_of(load(max + x * kLanes), old_max);
    store(group.row_max + x * kLanes, new_max);
    // A row that has seen no key yet keeps -inf; its weights are 2^(-inf - 0) = 0, not NaN.
    row_max[x] = new_max == -kInfinity ? Vec{} : new_max;
    shrink[x] = exp2_nonpositive(old_max - row_max[x]);
    row_sum[x] = Vec{};
  }
  for (int j = 0; j < keys; ++j) {
    float* s = scores + j * kRow;
    FASTATTN_UNROLL
    for (int x = 0; x < kVecs; ++x) {
      const Vec weight = exp2_nonpositive(load(s + x * kLanes) - row_max[x]);
      row_sum[x] += weight;
      store(s + x * kLanes, weight);
    }
  }
  FASTATTN_UNROLL
  for (int x = 0; x < kVecs; ++x) {
    float* total = group.row_sum + x * kLanes;
    store(total, load(total) * shrink[x] + row_sum[x]);
    store(group.shrink + x * kLanes, load(group.shrink + x * kLanes) * shrink[x]);
  }
}

// O^T = shrink * O^T + V^T P^T. With kGuarded a row takes nothing from a key it can't see, not even
// the NaN that 0 * inf would be; without, a hidden key adds an exact 0.
template <int kVecs, bool kGuarded>
void accumulate_tile(const Group& group, const Tile& tile, int head_dim_v, const float* weights,
                     const Vec (&shrink)[kVecs]) {
  constexpr int kRow = kVecs * kLanes;
  const int keys = tile.end - tile.begin;
  for (int d = 0; d < head_dim_v; d += kBroadcasts) {
    float* out = group.out + static_cast<std::int64_t>(d) * kRow;
    Vec sum[kBroadcasts][kVecs];
    FASTATTN_UNROLL
    for (int i = 0; i < kBroadcasts; ++i) {
      FASTATTN_UNROLL
      for (int x = 0; x < kVecs; ++x) sum[i][x] = Vec{};
    }
    const float* v = tile.v + d;
    const float* w = weights;
    for (int j = 0; j < keys; ++j, v += tile.v_stride, w += kRow) {
      Vec weight[kVecs];
      IntVec visible[kVecs];
      FASTATTN_UNROLL
      for (int x = 0; x < kVecs; ++x) {
        weight[x] = load(w + x * kLanes);
        if constexpr (kGuarded) {
          const std::int32_t key = tile.begin + j;
          visible[x] =
              (load(group.first + x * kLanes) <= key) & (load(group.last + x * kLanes) > key);
        }
      }
      FASTATTN_UNROLL
      for (int i = 0; i < kBroadcasts; ++i) {
        const Vec element = broadcast(v[i]);
        FASTATTN_UNROLL
        for (int x = 0; x < kVecs; ++x) {
          const Vec next = sum[i][x] + element * weight[x];
          if constexpr (kGuarded) {
            sum[i][x] = visible[x] ? next : sum[i][x];
          } else {
            sum[i][x] = next;
          }
        }
      }
    }
    FASTATTN_UNROLL
    for (int i = 0; i < kBroadcasts; ++i) {
      FASTATTN_UNROLL
      for (int x = 0; x < kVecs; ++x) {
        float* total = out + i * kRow + x * kLanes;
        store(total, load(total) * shrink[x] + sum[i][x]);
      }
    }
  }
}

// total = total * shrink + x, in two numbers (Knuth's TwoSum); x = 0.
FASTATTN_INLINE void fold(const Total& total, bool is_set, std::int64_t at, Vec shrink, float* x) {
  const Vec added = load(x + at);
  store(x + at, Vec{});
  if (!is_set) {
    store(total.sum + at, added);
    store(total.lost + at, Vec{});
    return;
  }
  const Vec old = load(total.sum + at) * shrink;
  const Vec sum = old + added;
  const Vec part = sum - old;
  store(total.sum + at, sum);
  store(total.lost + at, load(total.lost + at) * shrink + ((old - (sum - part)) + (added - part)));
}

void fold(Group& group, int head_dim_v) {
  const int width = group.vectors * kLanes;
  for (int lane = 0; lane < width; lane += kLanes) {
    const Vec shrink = load(group.shrink + lane);
    store(group.shrink + lane, broadcast(1.0F));
    fold(group.row_sum_total, group.is_folded, lane, shrink, group.row_sum);
    for (int d = 0; d < head_dim_v; ++d) {
      fold(group.out_total, group.is_folded, std::int64_t{d} * width + lane, shrink, group.out);
    }
  }
  group.is_folded = true;
}

// Of an infinite sum the loss is NaN.
FASTATTN_INLINE Vec whole(const Total& total, std::int64_t at) {
  const Vec lost = load(total.lost + at);
  return load(total.sum + at) + (lost * 0.0F == Vec{} ? lost : Vec{});
}

bool values_are_finite(const Tile& tile, int head_dim_v) {
  Vec zeros = {};
  for (int j = 0; j < tile.end - tile.begin; ++j) {
    const float* v = tile.v + j * tile.v_stride;
    for (int d = 0; d < head_dim_v; d += kLanes) {
      zeros += load_first<DType::kFloat32>(v + d, head_dim_v - d) * 0.0F;
    }
  }
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += zeros[i];
  return sum == 0;
}

template <int kVecs>
void attend_tile(const Group& group, const Tile& tile, const ForwardParams& p, float scale_log2,
                 float* scores) {
  const bool masked = group.first_max > tile.begin || group.last_min < tile.end;
  alignas(64) float max[kVecs * kLanes];
  Vec shrink[kVecs];
  score_tile<kVecs>(group, tile, masked, p.head_dim, scale_log2, scores, max);
  soften_tile<kVecs>(group, tile.end - tile.begin, scores, max, shrink);
  if (masked && !values_are_finite(tile, p.head_dim_v)) {
    accumulate_tile<kVecs, true>(group, tile, p.head_dim_v, scores, shrink);
  } else {
    accumulate_tile<kVecs, false>(group, tile, p.head_dim_v, scores, shrink);
  }
}

void attend_tile(const Group& group, const Tile& tile, const ForwardParams& p, float scale_log2,
                 float* scores) {
  if (group.vectors == 1) return attend_tile<1>(group, tile, p, scale_log2, scores);
  if constexpr (kVectors == 3) {
    if (group.vectors == 3) return attend_tile<3>(group, tile, p, scale_log2, scores);
  }
  attend_tile<2>(group, tile, p, scale_log2, scores);
}

// scale * log2(e) as a float; the exponentials are powers of two.
float scale_to_log2(float scale) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kMost = 3.4028234663852886e38;
  const double factor = static_cast<double>(scale) * kLog2E;
  return static_cast<float>(factor > kMost ? kMost : factor < -kMost ? -kMost : factor);
}

// The work of one task: rows row_begin .. row_begin + rows of one key/value head.
template <DType kDType>
struct Task {
  using Type = typename Element<kDType>::Type;
  const ForwardParams& p;
  Workspace w;
  std::int64_t batch, head_kv, row_begin;
  float scale_log2;
  int group_count = 0;

  [[nodiscard]] int heads_per_group() const { return p.heads_q / p.heads_kv; }
  [[nodiscard]] std::int64_t query_of(std::int64_t row) const { return row / heads_per_group(); }
  [[nodiscard]] std::int64_t head_of(std::int64_t row) const {
    return head_kv * heads_per_group() + row % heads_per_group();
  }
  template <class Pointer>
  [[nodiscard]] Pointer row_pointer(Pointer base, const Strides& stride, std::int64_t row) const {
    return base + batch * stride.batch + head_of(row) * stride.head + query_of(row) * stride.row;
  }

  // Row i stands at key i + N - M; what it sees is cut to 0 <= j < N.
  void set_range(Group& group, int lane, std::int64_t row) const {
    const std::int64_t position = query_of(row) + p.len_kv - p.len_q;
    std::int64_t first = p.mask.window_left >= 0 ? position - p.mask.window_left : 0;
    std::int64_t last = p.len_kv;
    if (p.mask.window_right >= 0 && position + p.mask.window_right + 1 < last) {
      last = position + p.mask.window_right + 1;
    }
    if (p.mask.causal && position + 1 < last) last = position + 1;
    if (first < 0) first = 0;
    if (last <= first) first = last = 0;
    group.first[lane] = static_cast<std::int32_t>(first);
    group.last[lane] = static_cast<std::int32_t>(last);
  }

  void start_group(Group& group, std::int64_t row, int rows) const {
    group.rows = rows;
    group.vectors = (rows + kLanes - 1) / kLanes;
    const int width = group.vectors * kLanes;
    const auto lane_row = [&](int lane) { return row + (lane < rows ? lane : rows - 1); };

    group.first_min = p.len_kv;
    group.first_max = group.last_max = 0;
    group.last_min = p.len_kv;
    for (int lane = 0; lane < width; ++lane) {
      set_range(group, lane, lane_row(lane));
      const int first = group.first[lane];
      const int last = group.last[lane];
      if (first < last && first < group.first_min) group.first_min = first;
      if (first > group.first_max) group.first_max = first;
      if (last < group.last_min) group.last_min = last;
      if (last > group.last_max) group.last_max = last;
      group.row_max[lane] = -kInfinity;
      group.row_sum[lane] = 0;
      group.shrink[lane] = 1;
    }

    for (int lane = 0; lane < width; lane += kLanes) {
      const Type* source[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        source[i] = row_pointer(static_cast<const Type*>(p.q), p.q_stride, lane_row(lane + i));
      }
      for (int d = 0; d < p.head_dim; d += kLanes) {
        Vec block[kLanes];
        FASTATTN_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          block[i] = load_first<kDType>(source[i] + d, p.head_dim - d);
        }
        transpose(block);
        FASTATTN_UNROLL
        for (int i = 0; i < kLanes; ++i) store(group.q + (d + i) * width + lane, block[i]);
      }
    }
    const std::int64_t out_size = round_up(p.head_dim_v, kColumnStep) * width;
    for (std::int64_t i = 0; i < out_size; i += kLanes) store(group.out + i, Vec{});
    group.is_folded = false;
  }

  void finish_group(Group& group, std::int64_t row) const {
    if (group.is_folded) fold(group, p.head_dim_v);
    const auto whole_sum = [&](const float* sum, const Total& total, std::int64_t at) {
      return group.is_folded ? whole(total, at) : load(sum + at);
    };
    const int width = group.vectors * kLanes;
    for (int lane = 0; lane < group.rows; lane += kLanes) {
      const int rows = group.rows - lane < kLanes ? group.rows - lane : kLanes;
      const Vec row_sum = whole_sum(group.row_sum, group.row_sum_total, lane);
      store(group.row_sum + lane, row_sum);
      // No key seen, or none with a score above -inf: out 0.
      const IntVec empty = row_sum == Vec{};
      const Vec inverse = empty ? Vec{} : 1.0F / row_sum;
      Type* target[kLanes];
      for (int i = 0; i < rows; ++i) {
        target[i] = row_pointer(static_cast<Type*>(p.out), p.out_stride, row + lane + i);
      }
      for (int d = 0; d < p.head_dim_v; d += kLanes) {
        Vec block[kLanes];
        FASTATTN_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          block[i] = whole_sum(group.out, group.out_total, (d + i) * width + lane) * inverse;
        }
        transpose(block);
        for (int i = 0; i < rows; ++i) {
          store_first<kDType>(target[i] + d, block[i], p.head_dim_v - d);
        }
      }
    }
    if (p.lse == nullptr) return;
    // From units of ln 2 to natural ones: by what scale_log2 was rounded from, not by ln 2.
    const double unit =
        scale_log2 == 0.0F ? 0.6931471805599453 : static_cast<double>(p.scale) / scale_log2;
    for (int lane = 0; lane < group.rows; ++lane) {
      const double max = static_cast<double>(group.row_max[lane]) * unit;
      const std::int64_t head = batch * p.heads_q + head_of(row + lane);
      p.lse[head * p.len_q + query_of(row + lane)] =
          static_cast<float>(max + static_cast<double>(__builtin_logf(group.row_sum[lane])));
    }
  }

  // rows [count][dim] of the caller's array as fp32: in place where that can be read, else copied.
  static const float* fetch(const void* array, std::int64_t offset, std::int64_t& stride, int count,
                            int dim, int padded_dim, float* copy) {
    const Type* source = static_cast<const Type*>(array) + offset;
    if constexpr (kDType == DType::kFloat32) {
      constexpr std::int64_t kMaxStride = kMaxStrideBytes / 4;
      if (dim == padded_dim && -kMaxStride < stride && stride < kMaxStride) return source;
    }
    for (int j = 0; j < count; ++j) {
      const Type* row = source + j * stride;
      float* target = copy + static_cast<std::int64_t>(j) * padded_dim;
      int d = 0;
      for (; d + kLanes <= dim; d += kLanes) {
        *reinterpret_cast<LooseVec*>(target + d) = Element<kDType>::load(row + d);
      }
      if (d < padded_dim) {
        // The padding may reach past this vector: a step is two of NEON's.
        const Vec tail = load_first<kDType>(row + d, dim - d);
        for (int i = d; i < padded_dim; ++i) target[i] = i < dim ? tail[i - d] : 0.0F;
      }
    }
    stride = padded_dim;
    return copy;
  }

  void run(int rows) {
    int first = p.len_kv;
    int last = 0;
    for (int begin = 0; begin < rows; begin += kGroupRows) {
      Group& group = w.groups[group_count++];
      const int left = rows - begin;
      start_group(group, row_begin + begin, left < kGroupRows ? left : kGroupRows);
      if (group.first_min < first) first = group.first_min;
      if (group.last_max > last) last = group.last_max;
    }
    const int padded_v = static_cast<int>(round_up(p.head_dim_v, kBroadcasts));
    const std::int64_t k_offset = batch * p.k_stride.batch + head_kv * p.k_stride.head;
    const std::int64_t v_offset = batch * p.v_stride.batch + head_kv * p.v_stride.head;
    // Tiles start at multiples of kTileKeys whatever the mask and the task, so a row's sums are
    // grouped the same way however the call is cut.
    for (std::int64_t start = first / kTileKeys * kTileKeys; start < last; start += kTileKeys) {
      const int begin = static_cast<int>(start < first ? first : start);
      const int end = static_cast<int>(start + kTileKeys < last ? start + kTileKeys : last);
      std::int64_t k_stride = p.k_stride.row;
      std::int64_t v_stride = p.v_stride.row;
      const float* k = fetch(p.k, k_offset + begin * p.k_stride.row, k_stride, end - begin,
                             p.head_dim, p.head_dim, w.k);
      const float* v = fetch(p.v, v_offset + begin * p.v_stride.row, v_stride, end - begin,
                             p.head_dim_v, padded_v, w.v);
      for (int i = 0; i < group_count; ++i) {
        const Group& group = w.groups[i];
        const int from = begin > group.first_min ? begin : group.first_min;
        const int to = end < group.last_max ? end : group.last_max;
        if (from >= to) continue;
        attend_tile(group,
                    {.begin = from,
                     .end = to,
                     .k = k + (from - begin) * k_stride,
                     .v = v + (from - begin) * v_stride,
                     .k_stride = k_stride,
                     .v_stride = v_stride},
                    p, scale_log2, w.scores);
      }
      if (start / kTileKeys % kFoldTiles == kFoldTiles - 1) {
        for (int i = 0; i < group_count; ++i) fold(w.groups[i], p.head_dim_v);
      }
    }
    for (int i = 0; i < group_count; ++i) {
      finish_group(w.groups[i], row_begin + static_cast<std::int64_t>(i) * kGroupRows);
    }
  }
};

template <DType kDType>
void run_typed(const Call& call, std::int64_t task, std::byte* memory) {
  const ForwardParams& p = call.params;
  const std::int64_t head = task / call.tasks_per_head;
  // The last rows see the most keys under a causal mask: they go first, and the threads end
  // together.
  const std::int64_t block = call.tasks_per_head - 1 - task % call.tasks_per_head;
  const std::int64_t rows_of_head = static_cast<std::int64_t>(p.heads_q / p.heads_kv) * p.len_q;
  const std::int64_t row_begin = block * call.rows_per_task;
  const std::int64_t left = rows_of_head - row_begin;
  Scratch scratch{reinterpret_cast<std::uintptr_t>(memory)};
  Task<kDType> work{.p = p,
                    .w = lay_out(call, scratch),
                    .batch = head / p.heads_kv,
                    .head_kv = head % p.heads_kv,
                    .row_begin = row_begin,
                    .scale_log2 = scale_to_log2(p.scale)};
  work.run(static_cast<int>(left < call.rows_per_task ? left : call.rows_per_task));
}

void run_task(const Call& call, std::int64_t task, std::byte* scratch) {
  switch (call.params.dtype) {
    case DType::kFloat32:
      return run_typed<DType::kFloat32>(call, task, scratch);
    case DType::kFloat16:
      return run_typed<DType::kFloat16>(call, task, scratch);
    case DType::kBFloat16:
      return run_typed<DType::kBFloat16>(call, task, scratch);
  }
}

}  // namespace

namespace FASTATTN_CPU_LEVEL {

const Level level = {.name = FASTATTN_CPU_LEVEL_NAME,
                     .lanes = kLanes,
                     .group_rows = kGroupRows,
                     .max_rows = kMaxGroups * kGroupRows,
                     .scratch_bytes = scratch_bytes,
                     .run_task = run_task};

}  // namespace FASTATTN_CPU_LEVEL
}  // namespace fastattn::cpu
