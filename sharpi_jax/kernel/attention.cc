// Causal grouped attention over a cache, as a call of XLA's foreign function interface.
//
//   slots of a row   |0 ............ 255|256 .......... 511|512 .... last|     ranges, shared out over threads
//                    |0..63|64..127| ...                                       blocks, read from memory once each
//
// For each row, key head and range, all of the window's queries go through the range block by block with an online
// softmax (Milakov & Gimelshein 2018); then each query's ranges are put together in order. Which blocks and ranges a
// query meets depends on its own position only, and all its sums have one order: so its bits depend neither on the
// other queries of the window, nor on rows, slots or threads.
#include <algorithm>
#include <limits>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace ffi = xla::ffi;

namespace sharpi {

constexpr int kBlock = 64, kRange = 256, kLine = 64;
// Queries and slots, queries and vectors of values that share loads: as many as the sums have registers for.
#if defined(__AVX512F__)
constexpr int kQueries = 4, kSlots = 4, kVectors = 4;
#else
constexpr int kQueries = 2, kSlots = 2, kVectors = 2;
#endif

// The types that a cache may have, and sixteen of their numbers as float32.
struct Float32 {
  using Number = float;
  static constexpr auto kStored = ffi::F32;
  static Wide lanes(const float* from) { return load_wide(from); }
};

struct Float16 {
  using Number = uint16_t;
  static constexpr auto kStored = ffi::F16;
  static Wide lanes(const uint16_t* from) { return load_half(from); }
};

struct Bfloat16 {
  using Number = uint16_t;
  static constexpr auto kStored = ffi::U16;
  static Wide lanes(const uint16_t* from) { return load_bfloat(from); }
};

using Stored = SHARPI_CACHE;  // what this library is compiled for

// A query's softmax so far, before its `width` weighted values.
struct Softmax {
  float highest, total;
};

// The queries of one row and key head, padding left out.
struct Task {
  int64_t row, head;
  int slots;                    // that the last of them sees
  std::vector<int> seen;        // slots that each sees
  std::vector<float*> out;      // where each one's result goes
  std::vector<float> queries;   // [queries, width]
  std::vector<Softmax> softmax; // [ranges, queries]
  std::vector<float> mixed;     // [ranges, queries, width]

  int ranges() const { return (slots + kRange - 1) / kRange; }
};

// Slots of one key head: slot i begins at k + i * step.
template <typename Type>
struct Block {
  const typename Type::Number *k, *v;
  int64_t step;
  int begin, slots;
};

// Scores of kRows queries, the first `slots` (or a few more) of a block: scores [kRows, kBlock].
template <int kRows, typename Type>
void score(const Block<Type>& block, const float* q, int width, int slots, float* scores) {
  for (int s = 0; s < slots; s += kSlots) {
    const typename Type::Number* k[kSlots];
    for (int i = 0; i < kSlots; ++i) k[i] = block.k + std::min(s + i, block.slots - 1) * block.step;
    Wide acc[kRows * kSlots] = {};
    for (int e = 0; e < width; e += kLanes) {
      Wide key[kSlots];
      for (int i = 0; i < kSlots; ++i) key[i] = Type::lanes(k[i] + e);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Wide query = load_wide(q + r * width + e);
#pragma GCC unroll 4
        for (int i = 0; i < kSlots; ++i) acc[r * kSlots + i] = fma(query, key[i], acc[r * kSlots + i]);
      }
    }
    const F32 done = sums<kRows * kSlots>(acc);
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kBlock + s, (const float*)&done + r * kSlots, kSlots * 4);
  }
}

// Turns a query's scores of a block into weights, of which those past `seen` are not used. Returns by how much all that
// came before must shrink.
float weigh(Softmax& softmax, float* scores, int seen) {
  for (int s = seen; s < kBlock; ++s) scores[s] = -std::numeric_limits<float>::infinity();
  F32 most = splat(softmax.highest), weights = {};
  for (int s = 0; s < kBlock; s += kLanes) {
    const F32 v = load<F32>(scores + s);
    most = v > most ? v : most;
  }
  float highest = most[0];
  for (int i = 1; i < kLanes; ++i) highest = std::max(highest, most[i]);
  for (int s = 0; s < kBlock; s += kLanes) {
    const F32 v = load<F32>(scores + s);
    const F32 weight = exp_of_negative(v - highest);
    std::memcpy(scores + s, &weight, sizeof(weight));
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    weights += lane + s < seen ? weight : F32{};
  }
  const float shrink = exp_of_negative(splat(softmax.highest - highest))[0];
  softmax = {highest, softmax.total * shrink + sum(weights)};
  return shrink;
}

// mixed[r] = mixed[r] * shrink[r] + the block's values from slot `first` to before `last`, by weight.
template <int kRows, typename Type>
void mix(const Block<Type>& block, const float* weights, const float* shrink, int first, int last, int width,
         float* mixed) {
  by_rows<kVectors>(0, width / kLanes, [&](int vector, auto vectors) {
    constexpr int kCount = vectors.value;
    Wide acc[kRows][kCount];
    auto at = [&](int r, int i) { return mixed + r * width + (vector + i) * kLanes; };
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kCount; ++i) acc[r][i] = fma(load_wide(at(r, i)), splat_wide(shrink[r]), Wide{});
    }
    for (int s = first; s < last; ++s) {
      Wide value[kCount];
      for (int i = 0; i < kCount; ++i) value[i] = Type::lanes(block.v + s * block.step + (vector + i) * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Wide weight = splat_wide(weights[r * kBlock + s]);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) acc[r][i] = fma(weight, value[i], acc[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kCount; ++i) std::memcpy(at(r, i), &acc[r][i], sizeof(Wide));
    }
  });
}

// Takes kRows queries on over one block.
template <int kRows, typename Type>
void attend(const Block<Type>& block, const float* q, const int* seen, int width, Softmax* softmax, float* mixed) {
  int counts[kRows];
  for (int r = 0; r < kRows; ++r) counts[r] = std::clamp(seen[r] - block.begin, 0, block.slots);
  const int most = *std::max_element(counts, counts + kRows), least = *std::min_element(counts, counts + kRows);
  if (most == 0) return;
  alignas(64) float weights[kRows * kBlock], shrink[kRows];
  const float no_shrink = 1;
  score<kRows>(block, q, width, most, weights);
  for (int r = 0; r < kRows; ++r) shrink[r] = counts[r] ? weigh(softmax[r], weights + r * kBlock, counts[r]) : 1;
  mix<kRows>(block, weights, shrink, 0, least, width, mixed);
  for (int r = 0; r < kRows; ++r) {
    if (counts[r] > least) mix<1>(block, weights + r * kBlock, &no_shrink, least, counts[r], width, mixed + r * width);
  }
}

// One cache of keys or values, [B, slots, heads, size].
template <typename Type>
struct Caches {
  const typename Type::Number *k, *v;
  int64_t slots, heads, size;

  Block<Type> block(int64_t row, int64_t head, int begin, int count) const {
    const int64_t at = ((row * slots + begin) * heads + head) * size;
    return {k + at, v + at, heads * size, begin, count};
  }
};

// A block in float32 whose heads are filled up with zeros to whole lanes, for sizes that are none.
template <typename Type>
Block<Float32> filled_up(const Block<Type>& block, int size, int width) {
  static thread_local std::vector<float> room;
  room.assign(2 * kBlock * width, 0);
  for (int s = 0; s < 2 * block.slots; ++s) {
    const auto* from = s % 2 ? block.v + s / 2 * block.step : block.k + s / 2 * block.step;
    for (int e = 0; e < size; e += kLanes) {
      typename Type::Number numbers[kLanes] = {};
      std::memcpy(numbers, from + e, std::min(kLanes, size - e) * sizeof(numbers[0]));
      const Wide lanes = Type::lanes(numbers);
      std::memcpy(room.data() + s * width + e, &lanes, sizeof(lanes));
    }
  }
  return {room.data(), room.data() + width, 2 * width, block.begin, block.slots};
}

// All queries of a task over one block.
template <typename Type>
void attend_block(const Caches<Type>& caches, Task& task, int begin, int width) {
  const int count = int(task.seen.size());
  const int64_t part = int64_t(begin / kRange) * count;
  const Block<Type> block = caches.block(task.row, task.head, begin, std::min(kBlock, task.slots - begin));
  auto all = [&](const auto& b) {
    by_rows<kQueries>(0, count, [&](int at, auto rows) {
      attend<rows.value>(b, task.queries.data() + at * width, task.seen.data() + at, width,
                         task.softmax.data() + part + at, task.mixed.data() + (part + at) * width);
    });
  };
  caches.size == width ? all(block) : all(filled_up(block, int(caches.size), width));
}

// Has memory read from end to end into the cache: arithmetic that goes head by head, and there four slots at once,
// would get it at a third of the speed.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) (void)static_cast<const volatile char*>(from)[i];
}

// One range of a row: a block at a time for all heads, which lie side by side in memory.
template <typename Type>
void attend_range(const Caches<Type>& caches, Task* tasks, int range, int width) {
  for (Task* task = tasks; task < tasks + caches.heads; ++task) {
    const int64_t count = task->seen.size();
    std::fill_n(task->softmax.data() + range * count, count, Softmax{-std::numeric_limits<float>::infinity(), 0});
    std::fill_n(task->mixed.data() + range * count * width, count * width, 0.0f);
  }
  for (int begin = range * kRange; begin < std::min(tasks->slots, (range + 1) * kRange); begin += kBlock) {
    const Block<Type> first = caches.block(tasks->row, 0, begin, 0);
    const int64_t bytes = std::min(kBlock, tasks->slots - begin) * first.step * int64_t(sizeof(*first.k));
    fetch(first.k, bytes);
    fetch(first.v, bytes);
    for (Task* task = tasks; task < tasks + caches.heads; ++task) attend_block(caches, *task, begin, width);
  }
}

// The result of a task's query: its ranges, in order.
void put_together(const Task& task, int query, int size, int width) {
  const int count = int(task.seen.size()), ranges = (task.seen[query] + kRange - 1) / kRange;
  auto part = [&](int range) { return task.softmax[int64_t(range) * count + query]; };
  float highest = part(0).highest, total = 0;
  for (int r = 1; r < ranges; ++r) highest = std::max(highest, part(r).highest);
  static thread_local std::vector<float> mixed;
  mixed.assign(width, 0);
  for (int r = 0; r < ranges; ++r) {
    const F32 share = exp_of_negative(splat(part(r).highest - highest));
    total += part(r).total * share[0];
    const float* from = task.mixed.data() + (int64_t(r) * count + query) * width;
    for (int e = 0; e < width; e += kLanes) {
      const F32 sum = fma(load<F32>(from + e), share, load<F32>(&mixed[e]));
      std::memcpy(&mixed[e], &sum, sizeof(sum));
    }
  }
  for (int e = 0; e < size; ++e) task.out[query][e] = mixed[e] / total;
}

template <typename Type>
void run(ffi::ThreadPool& pool, const Caches<Type>& caches, std::vector<Task>& tasks, int width) {
  struct Piece {
    Task* task;
    int range;
  };
  std::vector<Piece> pieces, queries;
  for (Task& task : tasks) {
    for (int r = 0; task.head == 0 && r < task.ranges(); ++r) pieces.push_back({&task, r});
    for (int i = 0; i < int(task.seen.size()); ++i) queries.push_back({&task, i});
  }
  parallel_for(pool, pieces.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attend_range(caches, pieces[i].task, pieces[i].range, width);
  });
  parallel_for(pool, queries.size(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) put_together(*queries[i].task, queries[i].range, int(caches.size), width);
  });
}

// q [B, T, N, G, E] scaled, positions and valid [B, T], caches [B, S, N, E] -> [B, T, N, G, E]; zeros for padding.
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> positions,
                     ffi::Buffer<ffi::PRED> valid, ffi::Buffer<Stored::kStored> k,
                     ffi::Buffer<Stored::kStored> v,
                     ffi::Result<ffi::Buffer<ffi::F32>> mixed) {
  const auto dims = q.dimensions();
  const int64_t rows = dims[0], window = dims[1], heads = dims[2], group = dims[3], size = dims[4];
  const int64_t slots = k.dimensions()[1], width = (size + kLanes - 1) / kLanes * kLanes;
  std::fill_n(mixed->typed_data(), mixed->element_count(), 0.0f);
  static thread_local std::vector<Task> tasks;  // kept for their room
  tasks.resize(rows * heads);
  for (int64_t i = 0; i < rows * heads; ++i) {
    Task& task = tasks[i];
    task.row = i / heads, task.head = i % heads, task.slots = 0;
    task.seen.clear(), task.out.clear(), task.queries.clear();
    for (int64_t t = task.row * window; t < (task.row + 1) * window; ++t) {
      if (!valid.typed_data()[t]) continue;
      const int seen = int(std::min<int64_t>(positions.typed_data()[t] + 1, slots));
      task.slots = std::max(task.slots, seen);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t at = ((t * heads + task.head) * group + g) * size;
        task.seen.push_back(seen);
        task.out.push_back(mixed->typed_data() + at);
        task.queries.resize(task.seen.size() * width);
        std::copy_n(q.typed_data() + at, size, task.queries.end() - width);
      }
    }
    const int64_t parts = task.ranges() * task.seen.size();
    task.softmax.resize(parts);
    task.mixed.resize(parts * width);
  }
  const Caches<Stored> caches = {k.typed_data(), v.typed_data(), slots, heads, size};
  run(pool, caches, tasks, int(width));
  return ffi::Error::Success();
}

}  // namespace sharpi

XLA_FFI_DEFINE_HANDLER_SYMBOL(sharpi_attention, sharpi::Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<sharpi::Stored::kStored>>()
                                  .Arg<ffi::Buffer<sharpi::Stored::kStored>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
