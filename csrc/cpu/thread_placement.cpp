#include "thread_placement.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pagemill {
namespace {

int64_t read_clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void HelperPlacement::attach() {
  CPU_ZERO(&affinity_);
  sched_getaffinity(0, sizeof(affinity_), &affinity_);
  pthread_getcpuclockid(pthread_self(), &cpu_clock_);
  thread_id_.store(static_cast<int>(syscall(SYS_gettid)), std::memory_order_release);
}

void HelperPlacement::leave_cpu(int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getcpu() != cpu) return;
  cpu_set_t others = affinity_;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0) return;
  if (sched_setaffinity(0, sizeof(others), &others) == 0) sched_setaffinity(0, sizeof(affinity_), &affinity_);
}

int64_t HelperPlacement::cpu_time_ns() const { return read_clock_ns(cpu_clock_); }

void HelperPlacement::sample_cpu_time() {
  if (thread_id_.load(std::memory_order_acquire) == 0 || !busy_.load(std::memory_order_relaxed)) {
    sampled_at_ns_ = 0;
    return;
  }
  sampled_at_ns_ = read_clock_ns(CLOCK_MONOTONIC);
  sampled_cpu_time_ns_ = cpu_time_ns();
}

bool HelperPlacement::is_starved() const {
  if (sampled_at_ns_ == 0 || !busy_.load(std::memory_order_relaxed)) return false;
  const int64_t elapsed_ns = read_clock_ns(CLOCK_MONOTONIC) - sampled_at_ns_;
  return (cpu_time_ns() - sampled_cpu_time_ns_) * 4 < elapsed_ns;
}

void HelperPlacement::pull_to_current_cpu() {
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &affinity_)) return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(cpu, &here);
  is_pulled_ = sched_setaffinity(thread_id_.load(std::memory_order_relaxed), sizeof(here), &here) == 0;
}

void HelperPlacement::release() {
  if (!is_pulled_) return;
  sched_setaffinity(thread_id_.load(std::memory_order_relaxed), sizeof(affinity_), &affinity_);
  is_pulled_ = false;
}

}  // namespace pagemill
