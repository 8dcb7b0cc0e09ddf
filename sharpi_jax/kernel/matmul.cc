// x W^T on packed weights, as a call of XLA's foreign function interface.
//
// Threads share the tiles out. Up to 8 rows (4 in float32) go through a tile together, which is unpacked in registers as
// they go: decoding reads every byte of the weight once and is bound by memory. A prompt's many rows come back to a tile
// in the cache, and are bound by arithmetic.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "products.h"

namespace ffi = xla::ffi;

namespace sharpi {

using Fmt = Format<SHARPI_FORMAT>;
using Rounded = Activations8<Fmt::kGroup>;

struct Activations {
  const float* x;
  int rows, inputs;
};

constexpr int kRowsAtOnce = 64;  // that meet all tiles of a piece before the next rows do: both stay in the cache

void store(float* y, int64_t columns, int64_t tile, int64_t row, F32 sum) {
  const int64_t begin = tile * kLanes, lanes = std::min<int64_t>(kLanes, columns - begin);
  std::memcpy(y + row * columns + begin, &sum, lanes * sizeof(float));
}

void float_tile(const Weight& w, const Activations& x, int first, int last, int64_t columns, int64_t tile, float* y) {
  const Unpacked<Fmt> unpacked{{w, tile}, float_offset(w)};
  auto run = [&](const auto& source) {
    by_rows<4>(first, last, [&](int row, auto rows) {
      F32 sums[rows.value];
      multiply_float<rows.value>(source, x.x + int64_t(row) * x.inputs, x.inputs, sums);
      for (int r = 0; r < rows.value; ++r) store(y, columns, tile, row + r, sums[r]);
    });
  };
  if (last - first <= 4) return run(unpacked);
  static thread_local std::vector<F32> dense;  // of one tile: it stays in the second cache
  dense.resize(x.inputs);
  unpacked.each(x.inputs, [&](int k, const F32* w) { std::copy_n(w, 4, &dense[k]); });
  run(Dense{dense.data()});
}

// Where a row's first group lies.
inline int64_t place(int64_t row, int64_t groups) { return row / kTogether * groups * kTogether + row % kTogether; }

void int8_tile(const Weight& w, const Rounded* x, int first, int last, int64_t columns, int64_t tile,
               float* y) {
  by_rows<kTogether>(first, last, [&](int row, auto n) {
    F32 sums[n.value];
    multiply_int8<Fmt, n.value>(w, tile, x + place(row, w.inputs / Fmt::kGroup), sums);
    for (int r = 0; r < n.value; ++r) store(y, columns, tile, row + r, sums[r]);
  });
}

// One row of activations in blocks of 32: scale = largest magnitude / 127, nearest whole number, ties to even.
void quantise_row(const float* x, int inputs, Rounded* out) {
  for (int at = 0; at < inputs; at += kBlock) {
    F32 most = {};
    for (int i = 0; i < kBlock; i += kLanes) {
      const F32 v = load<F32>(x + at + i);
      most = v > most ? v : most;
      most = -v > most ? -v : most;
    }
    float largest = 0;
    for (int i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]);
    const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    int8_t q[kBlock];
    // Adding 1.5 * 2^23 rounds to whole numbers.
    for (int i = 0; i < kBlock; ++i) q[i] = int8_t((x[at + i] * inverse + 12582912.0f) - 12582912.0f);
    for (int i = 0; i < kBlock; i += Fmt::kGroup, out += kTogether) {
      std::memcpy(out->x, q + i, Fmt::kGroup);
      out->sum = std::accumulate(q + i, q + i + Fmt::kGroup, 0);
      out->scale = scale;
      out->scaled_sum = scale * float(out->sum);
    }
  }
}

const Rounded* quantise(ffi::ThreadPool& pool, const Activations& a) {
  static thread_local std::vector<Rounded> out;
  const int64_t groups_of_a_row = a.inputs / Fmt::kGroup;
  out.resize((a.rows + kTogether - 1) / kTogether * kTogether * groups_of_a_row);
  auto* groups = out.data();
  const int64_t piece = std::max<int64_t>(1, 65536 / a.inputs);  // fewer are not worth another thread
  parallel_for(pool, a.rows, piece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) quantise_row(a.x + r * a.inputs, a.inputs, groups + place(r, groups_of_a_row));
  });
  return groups;
}

void multiply(ffi::ThreadPool& pool, const Weight& w, const Activations& x, int64_t columns, bool int8, float* y) {
  const int64_t tiles = (columns + kLanes - 1) / kLanes;
  const int64_t bytes = int64_t(w.inputs) * kLanes * Fmt::kBits / 8;  // of a tile
  const int64_t piece = std::max<int64_t>(1, std::min(tiles / (4 * pool.num_threads()), (int64_t{1} << 19) / bytes));
  const auto* quantised = int8 ? quantise(pool, x) : nullptr;
  parallel_for(pool, tiles, piece, [&](int64_t begin, int64_t end) {
    for (int first = 0; first < x.rows; first += kRowsAtOnce) {
      const int last = std::min(x.rows, first + kRowsAtOnce);
      for (int64_t tile = begin; tile < end; ++tile) {
        int8 ? int8_tile(w, quantised, first, last, columns, tile, y)
             : float_tile(w, x, first, last, columns, tile, y);
      }
    }
  });
}

// Reads the operands: x [rows, inputs], the matrix's place in a stack, then the fields that the format has.
ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> index, ffi::RemainingArgs fields,
                  ffi::Result<ffi::Buffer<ffi::F32>> y, int32_t block_size, int32_t offset,
                  ffi::Span<const int32_t> table, bool exponent, bool has_small, bool has_small_m, bool int8) {
  Weight w = {};
  const int64_t columns = y->dimensions()[1];
  const Activations activations = {x.typed_data(), int(x.dimensions()[0]), int(x.dimensions()[1])};
  size_t next = 0;
  bool is_signed = false;
  auto take = [&](bool present) -> const uint8_t* {
    if (!present) return nullptr;
    auto buffer = fields.get<ffi::AnyBuffer>(next++);
    is_signed = buffer->element_type() == ffi::S8;
    const auto dims = buffer->dimensions();
    const size_t matrix = buffer->size_bytes() / (dims.size() > 3 ? dims[0] : 1);
    return static_cast<const uint8_t*>(buffer->untyped_data()) + matrix * size_t(*index.typed_data());
  };
  w.low = take(true);
  w.high = take(Fmt::kHigh > 0);
  w.d = take(true);
  w.small = take(has_small);
  w.small_is_signed = is_signed;
  w.m = take(Fmt::kMinimum);
  w.small_m = take(has_small_m);
  w.inputs = activations.inputs, w.block_size = block_size, w.exponent = exponent, w.offset = offset;
  for (size_t i = 0; i < table.size(); ++i) w.code_table[i] = uint8_t(table[i] + offset);
  multiply(pool, w, activations, columns, int8, y->typed_data());
  return ffi::Error::Success();
}

}  // namespace sharpi

XLA_FFI_DEFINE_HANDLER_SYMBOL(sharpi_matmul, sharpi::Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("block_size")
                                  .Attr<int32_t>("offset")
                                  .Attr<ffi::Span<const int32_t>>("table")
                                  .Attr<bool>("exponent")
                                  .Attr<bool>("has_small")
                                  .Attr<bool>("has_small_m")
                                  .Attr<bool>("int8"));
