// Rows divided by their size: x / sqrt(sum(x^2) / divisor + eps) * weight.
//
// A row is summed in sixteen lanes and these in a fixed order, so its bits do not depend on how many rows there are.
#include <cmath>

#include "isa.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace sharpi {

float sum_of_squares(const float* x, int64_t width) {
  F32 lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32 v = load<F32>(x + i);
    lanes = fma(v, v, lanes);
  }
  if (i < width) {  // what is left of a row, filled up with zeros
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, (width - i) * sizeof(float));
    const F32 v = load<F32>(rest);
    lanes = fma(v, v, lanes);
  }
  return sum(lanes);
}

ffi::Error Norms(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::Result<ffi::Buffer<ffi::F32>> y,
                 float divisor, float eps) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* w = weight.typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x.typed_data() + r * width;
    float* to = y->typed_data() + r * width;
    const float scale = 1 / std::sqrt(sum_of_squares(from, width) / divisor + eps);
    for (int64_t i = 0; i < width; ++i) to[i] = from[i] * scale * w[i];
  }
  return ffi::Error::Success();
}

}  // namespace sharpi

XLA_FFI_DEFINE_HANDLER_SYMBOL(sharpi_norms, sharpi::Norms,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("divisor")
                                  .Attr<float>("eps"));
