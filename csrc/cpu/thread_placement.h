// Keeps a pool's helper threads on useful cores when another process competes for them.
//
// Two things cost a factor of 1.2 to 4 there. A wake-up tends to put the helper on the core of the thread that woke
// it, where the two then take turns. And a helper that loses its core in the middle of a chunk waits for a timeslice
// (4 to 16 ms) while the caller idles on a core where the chunk could finish.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace pagemill {

class HelperPlacement {
 public:
  // By the helper, once, before any other call.
  void attach();

  // By the helper: moves away from `cpu` if it runs there and may run elsewhere. The affinity mask stays as it was.
  void leave_cpu(int cpu);

  // By the helper around its work on a region.
  void set_busy(bool busy) { busy_.store(busy, std::memory_order_relaxed); }

  // By the caller, when it begins to wait for helpers.
  void sample_cpu_time();

  // By the caller, later: whether the helper is busy and has not run for most of the time since the sample.
  bool is_starved() const;

  // By the caller, which is about to sleep: moves the helper to this core; release() undoes the restriction.
  void pull_to_current_cpu();
  void release();

 private:
  int64_t cpu_time_ns() const;

  cpu_set_t affinity_{};
  clockid_t cpu_clock_{};
  std::atomic<int> thread_id_{0};  // 0 until attached
  std::atomic<bool> busy_{false};
  bool is_pulled_ = false;
  int64_t sampled_cpu_time_ns_ = 0;
  int64_t sampled_at_ns_ = 0;
};

}  // namespace pagemill
