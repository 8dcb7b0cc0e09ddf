// Work shared out over XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace sharpi {

// Calls body(begin, end) on pieces of [0, count) until all are done. The calling thread takes pieces too, and waits
// only for those that were begun: helpers that the pool starts too late find nothing left. So it cannot hang, even
// where all of the pool's threads are waiting here.
inline void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t piece,
                         const std::function<void(int64_t, int64_t)>& body) {
  const int64_t pieces = (count + piece - 1) / piece;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (helpers <= 0) return body(0, count);
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, pieces, piece, count, &body] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < pieces;) {
      body(i * piece, std::min(count, (i + 1) * piece));
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < pieces; ++spins) {
    if (spins > 1000) std::this_thread::yield();  // on a busy machine the other thread may have to get its turn first
  }
}

}  // namespace sharpi
