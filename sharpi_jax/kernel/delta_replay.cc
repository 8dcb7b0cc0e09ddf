// The states of the gated delta rule after a window's kept positions, in place: each is read and written once, and an
// element goes through all positions in a register.
#include <algorithm>

#include "delta.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace sharpi {

// One head's state after `count` positions. k, d: of the first position, the next is `step` away; decay: `heads` away.
void replay(float* state, const float* k, const float* d, const float* decay, int64_t count, int64_t heads,
            int64_t width) {
  const int64_t step = heads * width;
  by_strips(width, [&](int64_t at, auto vectors, auto lanes) {
    constexpr int N = decltype(vectors)::value;
    for (int64_t row = 0; row < width; ++row) {
      float* to = state + row * width + at;
      F32 s[N];
      for (int n = 0; n < N; ++n) s[n] = load_lanes(to + n * kLanes, lanes);
      for (int64_t t = 0; t < count; ++t) {
        const float* wrote = d + t * step + at;
        for (int n = 0; n < N; ++n) {
          s[n] = advance(s[n], decay[t * heads], k[t * step + row], load_lanes(wrote + n * kLanes, lanes));
        }
      }
      for (int n = 0; n < N; ++n) store_lanes(to + n * kLanes, s[n], lanes);
    }
  });
}

// The first operand is the result's own buffer (input_output_aliases).
ffi::Error DeltaReplay(ffi::ThreadPool pool, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> d,
                       ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::S32> count,
                       ffi::Result<ffi::Buffer<ffi::F32>> state) {
  const auto dims = k.dimensions();
  const int64_t rows = dims[0], T = dims[1], heads = dims[2], width = dims[3];
  parallel_for(pool, rows * heads, heads_of_a_piece(width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t kept = std::min<int64_t>(T, count.typed_data()[i / heads]);
      if (kept <= 0) continue;
      const int64_t head = i / heads * T * heads + i % heads;
      replay(state->typed_data() + i * width * width, k.typed_data() + head * width, d.typed_data() + head * width,
             decay.typed_data() + head, kept, heads, width);
    }
  });
  return ffi::Error::Success();
}

}  // namespace sharpi

XLA_FFI_DEFINE_HANDLER_SYMBOL(sharpi_delta_replay, sharpi::DeltaReplay,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
