#include "pagemill/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "thread_placement.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagemill {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxChunks = (int64_t{1} << 32) - 1;
// Long enough to bridge the Python code between two kernels of a decode step, short enough that a pool with no work
// gives its cores back at once.
constexpr int64_t kDefaultSpinUs = 50;
// How long the caller waits for the last chunks before it asks whether their helpers have lost their cores.
constexpr int64_t kPatienceNs = 20'000;

thread_local int current_thread = -1;  // number inside a region, -1 outside

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Waits until word != value: spins for spin_ns, then sleeps. `sleepers` tells the waker whether a wake is needed.
void wait_while_equal(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& sleepers, int64_t spin_ns) {
  const int64_t deadline_ns = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      pause_cpu();
    }
  } while (now_ns() < deadline_ns);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == value) futex_wait(word, value);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

int64_t spin_ns_from_environment() {
  const char* text = std::getenv("PAGEMILL_SPIN_US");
  if (text == nullptr || *text == '\0') return kDefaultSpinUs * 1000;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 0 || value > 1'000'000) {
    throw std::invalid_argument("PAGEMILL_SPIN_US must be a number of microseconds in [0, 1000000], not '" +
                                std::string(text) + "'");
  }
  return value * 1000;
}

// Two hardware threads of one core share its vector and tile units: a second kernel thread there only adds contention.
int count_physical_cores() {
  cpu_set_t affinity;
  CPU_ZERO(&affinity);
  if (sched_getaffinity(0, sizeof(affinity), &affinity) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &affinity)) continue;
    const std::string name = std::to_string(cpu);
    std::ifstream file("/sys/devices/system/cpu/cpu" + name + "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(std::getline(file, siblings) ? siblings : name);
  }
  return std::clamp(static_cast<int>(cores.size()), 1, kMaxThreads);
}

int cgroup_quota_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period_us = 0;
  if (!(file >> quota >> period_us) || quota == "max" || period_us <= 0) return kMaxThreads;
  const double quota_us = std::strtod(quota.c_str(), nullptr);
  return std::clamp(static_cast<int>(std::ceil(quota_us / period_us)), 1, kMaxThreads);
}

int default_num_threads() { return std::min(count_physical_cores(), cgroup_quota_cores()); }

class ThreadPool {
 public:
  explicit ThreadPool(int count) : spin_ns_(spin_ns_from_environment()), num_threads_(count) {}

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void set_num_threads(int count) {
    std::lock_guard lock(caller_mutex_);
    if (count == num_threads()) return;
    stop_helpers();
    num_threads_.store(count, std::memory_order_relaxed);
  }

  void run(int64_t num_chunks, FunctionRef<void(int64_t, int)> body) {
    std::lock_guard lock(caller_mutex_);
    current_thread = 0;
    if (num_chunks == 1 || num_threads() == 1) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, 0);
    } else {
      if (helpers_.empty()) start_helpers();
      for (int64_t first = 0; first < num_chunks; first += kMaxChunks) {
        run_shared(first, std::min(kMaxChunks, num_chunks - first), body);
      }
    }
    current_thread = -1;
  }

 private:
  void run_shared(int64_t first, int64_t count, FunctionRef<void(int64_t, int)> body) {
    body_ = &body;
    first_ = first;
    count_ = count;
    unfinished_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    unclaimed_.store(static_cast<uint64_t>(count), std::memory_order_release);
    caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (helpers_asleep_.load(std::memory_order_seq_cst) > 0) {
      futex_wake(epoch_, static_cast<int>(std::min<int64_t>(count - 1, INT_MAX)));
    }
    work(0);
    if (unfinished_.load(std::memory_order_acquire) != 0) wait_for_helpers();
  }

  // All chunks are claimed and a helper still holds one.
  void wait_for_helpers() {
    if (spin_until_finished(kPatienceNs)) return;
    for (HelperPlacement& placement : placements_) placement.sample_cpu_time();
    if (spin_until_finished(std::max(spin_ns_, kPatienceNs))) return;
    for (HelperPlacement& placement : placements_) {
      if (placement.is_starved()) placement.pull_to_current_cpu();
    }
    for (uint32_t left = unfinished_.load(std::memory_order_acquire); left != 0;
         left = unfinished_.load(std::memory_order_acquire)) {
      wait_while_equal(unfinished_, left, caller_asleep_, 0);
    }
    for (HelperPlacement& placement : placements_) placement.release();
  }

  bool spin_until_finished(int64_t limit_ns) const {
    const int64_t deadline_ns = now_ns() + limit_ns;
    do {
      for (int i = 0; i < 16; ++i) {
        if (unfinished_.load(std::memory_order_acquire) == 0) return true;
        pause_cpu();
      }
    } while (now_ns() < deadline_ns);
    return false;
  }

  // Claims chunks until none is left. The claim is a compare-and-swap on the number of unclaimed chunks: a helper that
  // arrives late, even in a later region, either claims a chunk of the region now running or sees zero. The fields of a
  // region are read after the claim only, and stay as they are until the claimed chunk is finished.
  void work(int thread) {
    uint64_t unclaimed = unclaimed_.load(std::memory_order_acquire);
    while (unclaimed != 0) {
      if (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acq_rel,
                                            std::memory_order_acquire)) {
        continue;
      }
      (*body_)(first_ + count_ - static_cast<int64_t>(unclaimed), thread);
      const bool is_last = unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1;
      if (is_last && caller_asleep_.load(std::memory_order_seq_cst) > 0) futex_wake(unfinished_, 1);
      unclaimed = unclaimed_.load(std::memory_order_acquire);
    }
  }

  void helper_main(int thread, uint32_t seen_epoch) {
    current_thread = thread;
    HelperPlacement& placement = placements_[static_cast<size_t>(thread - 1)];
    placement.attach();
    while (true) {
      wait_while_equal(epoch_, seen_epoch, helpers_asleep_, spin_ns_);
      seen_epoch = epoch_.load(std::memory_order_acquire);
      if (stopping_.load(std::memory_order_acquire)) return;
      placement.leave_cpu(caller_cpu_.load(std::memory_order_relaxed));
      placement.set_busy(true);
      work(thread);
      placement.set_busy(false);
    }
  }

  void start_helpers() {
    stopping_.store(false, std::memory_order_release);
    placements_ = std::vector<HelperPlacement>(static_cast<size_t>(num_threads() - 1));
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    // Signals belong to the threads of the application.
    sigset_t all_signals, previous_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_signals);
    for (int thread = 1; thread < num_threads(); ++thread) {
      helpers_.emplace_back([this, thread, epoch] { helper_main(thread, epoch); });
      pthread_setname_np(helpers_.back().native_handle(), ("pagemill-" + std::to_string(thread)).c_str());
    }
    pthread_sigmask(SIG_SETMASK, &previous_signals, nullptr);
  }

  void stop_helpers() {
    stopping_.store(true, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(epoch_, INT_MAX);
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
  }

  const int64_t spin_ns_;
  std::mutex caller_mutex_;  // guards the fields of a region and helpers_
  std::atomic<int> num_threads_;
  std::vector<std::thread> helpers_;
  std::vector<HelperPlacement> placements_;  // of helpers_, in order
  FunctionRef<void(int64_t, int)>* body_ = nullptr;
  int64_t first_ = 0;
  int64_t count_ = 0;
  std::atomic<bool> stopping_{false};
  std::atomic<int> caller_cpu_{-1};
  // Each on its own cache line: helpers spin on the epoch while the others change.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> helpers_asleep_{0};
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<int> caller_asleep_{0};
};

// Never destroyed: at exit the helpers sleep or spin on memory that stays valid until the process is gone.
std::atomic<ThreadPool*> instance{nullptr};

// A forked child has none of the helpers, and the pool's mutex may be held by a thread that no longer exists: it
// gets a pool of its own, of the same size, when it first needs one.
std::atomic<int> forked_num_threads{0};

void forget_pool_after_fork() {
  ThreadPool* const parent_pool = instance.exchange(nullptr);
  if (parent_pool != nullptr) forked_num_threads.store(parent_pool->num_threads());
  current_thread = -1;
}

ThreadPool& pool() {
  ThreadPool* existing = instance.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  static const bool registered = pthread_atfork(nullptr, nullptr, forget_pool_after_fork) == 0;
  (void)registered;
  const int inherited = forked_num_threads.load();
  auto created = std::make_unique<ThreadPool>(inherited > 0 ? inherited : default_num_threads());
  if (instance.compare_exchange_strong(existing, created.get())) return *created.release();
  return *existing;
}

}  // namespace

int num_threads() { return pool().num_threads(); }

void set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument("num_threads must lie in [1, 1024], not " + std::to_string(count));
  }
  pool().set_num_threads(count);
}

void parallel_for(int64_t num_chunks, FunctionRef<void(int64_t chunk, int thread)> body) {
  if (num_chunks <= 0) return;
  if (current_thread >= 0) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, current_thread);
    return;
  }
  pool().run(num_chunks, body);
}

}  // namespace pagemill
