// Process-wide thread pool of the CPU kernels.
//
// The calling thread works too. Chunks are claimed one at a time from a shared counter, so a helper thread that
// the operating system has descheduled (or not woken yet) delays a region by at most the one chunk it holds.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace pagemill {

template <typename Signature>
class FunctionRef;

// A non-owning reference to a callable; the callable must outlive the reference.
template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <typename Callable, typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, FunctionRef>>>
  FunctionRef(Callable&& callable)  // NOLINT: implicit, so that a lambda can be passed directly
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  Result (*call_)(void*, Args...);
};

// Threads a region may use, the calling thread included. Default: the physical cores in the affinity mask of the
// process, bounded by the cgroup's CPU quota.
int num_threads();

// Takes effect for the next region; waits for a running one. Throws std::invalid_argument unless 1 <= count <= 1024.
void set_num_threads(int count);

// Runs body(chunk, thread) once for each chunk in [0, num_chunks) and returns when all are done.
//
// `thread` lies in [0, num_threads()) and no two concurrent calls of body share it, so it can index scratch memory.
// Which thread runs which chunk is not defined: results must not depend on it. `body` must not throw. A call from
// inside a body runs inline on that thread with that thread's number. Calls from several threads are serialised.
void parallel_for(int64_t num_chunks, FunctionRef<void(int64_t chunk, int thread)> body);

}  // namespace pagemill
