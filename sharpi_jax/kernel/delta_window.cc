// A decode window of the gated delta rule: what each position reads and writes, the state left as it is.
//
// A state is read once from memory: one pass over it does for both reads of a position, and the passes of the later
// positions, each of which first advances the state by what the one before wrote, find it in the cache. Sums run over
// the rows in order, so a position's bits know neither the window's width nor other heads nor threads.
#include <algorithm>
#include <vector>

#include "delta.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace sharpi {

// The vectors of one position and one head.
struct Position {
  const float *q, *k, *v;
  float decay, beta;
  float *o, *d;
};

float dot(const float* a, const float* b, int64_t width) {
  F32 lanes = {};
  by_strips<1>(width, [&](int64_t at, auto, auto n) { lanes = fma(load_lanes(a + at, n), load_lanes(b + at, n), lanes); });
  return sum(lanes);
}

// One position from the state before it: d = beta (v - decay S^T k), o = decay S^T q + (q . k) d. `from` is the state
// before the position `before` if there is one; it is brought up to date on the way and, if asked, kept in `to`.
void one_position(const Position& now, const Position* before, const float* from, float* to, int64_t width) {
  const float qk = dot(now.q, now.k, width);
  by_strips(width, [&](int64_t at, auto vectors, auto lanes) {
    constexpr int N = decltype(vectors)::value;
    F32 read_k[N] = {}, read_q[N] = {}, wrote[N] = {};
    for (int n = 0; before && n < N; ++n) wrote[n] = load_lanes(before->d + at + n * kLanes, lanes);
    for (int64_t row = 0; row < width; ++row) {
      const int64_t place = row * width + at;
      F32 s[N];
      for (int n = 0; n < N; ++n) s[n] = load_lanes(from + place + n * kLanes, lanes);
      if (before) {
        for (int n = 0; n < N; ++n) s[n] = advance(s[n], before->decay, before->k[row], wrote[n]);
      }
      if (to) {
        for (int n = 0; n < N; ++n) store_lanes(to + place + n * kLanes, s[n], lanes);
      }
      const F32 k = splat(now.k[row]), q = splat(now.q[row]);
      for (int n = 0; n < N; ++n) read_k[n] = fma(s[n], k, read_k[n]);
      for (int n = 0; n < N; ++n) read_q[n] = fma(s[n], q, read_q[n]);
    }
    for (int n = 0; n < N; ++n) {
      const int64_t column = at + n * kLanes;
      const F32 d = splat(now.beta) * fma(splat(-now.decay), read_k[n], load_lanes(now.v + column, lanes));
      store_lanes(now.d + column, d, lanes);
      store_lanes(now.o + column, fma(splat(now.decay), read_q[n], splat(qk) * d), lanes);
    }
  });
}

ffi::Error DeltaWindow(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                       ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> state,
                       ffi::Result<ffi::Buffer<ffi::F32>> o, ffi::Result<ffi::Buffer<ffi::F32>> d) {
  const auto dims = q.dimensions();
  const int64_t rows = dims[0], T = dims[1], heads = dims[2], width = dims[3];
  parallel_for(pool, rows * heads, heads_of_a_piece(width), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<F32> scratch;  // a state: it stays in the second cache
    if (T > 2) scratch.resize((width * width + kLanes - 1) / kLanes);
    for (int64_t i = begin; i < end; ++i) {
      const float* S = state.typed_data() + i * width * width;
      Position now, before;
      for (int64_t t = 0; t < T; ++t, before = now) {
        const int64_t head = (i / heads * T + t) * heads + i % heads, at = head * width;
        now = {q.typed_data() + at, k.typed_data() + at, v.typed_data() + at, decay.typed_data()[head],
               beta.typed_data()[head], o->typed_data() + at, d->typed_data() + at};
        // Only what a later position advances further must be kept.
        float* to = t > 0 && t + 1 < T ? reinterpret_cast<float*>(scratch.data()) : nullptr;
        one_position(now, t > 0 ? &before : nullptr, S, to, width);
        if (to) S = to;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace sharpi

XLA_FFI_DEFINE_HANDLER_SYMBOL(sharpi_delta_window, sharpi::DeltaWindow,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
