// A parallel loop on XLA's own threads. The caller works too, so the loop ends even when no other thread is free:
// kernels that XLA runs side by side cannot wait for each other.
#pragma once
#include <atomic>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace noon {

template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, long count, const Body& body) {
  struct State {
    std::atomic<long> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, &body] {  // `body` is only touched for an index below `count`, and we wait for those
    for (long i; (i = state->next.fetch_add(1)) < count;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const long helpers = std::min<long>(count, pool.num_threads()) - 1;
  for (long i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace noon
