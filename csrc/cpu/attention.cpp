// Splits a batch of any mix of prefill and decode into tasks for the threads.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "kernel_table.h"
#include "pagemill/kernels.h"
#include "pagemill/thread_pool.h"

namespace pagemill {
namespace {

// Enough that threads end at nearly the same time, few enough that most tasks have one before them.
constexpr int64_t kBundlesPerThread = 8;

// Below this many (row, key) pairs a second thread costs more than it saves.
constexpr int64_t kInlineWork = 4096;

class AlignedBuffer {
 public:
  void* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      data_.reset(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
      capacity_ = data_ != nullptr ? bytes : 0;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  int64_t capacity_ = 0;
};

// Reused from call to call, so that a step allocates nothing once it has seen its largest batch.
thread_local AlignedBuffer task_scratch;
thread_local AlignedBuffer partial_buffer;

struct WorkItem {
  AttentionTask task;
  int64_t partial_offset;  // in floats; -1: the task writes its output
};

struct FoldItem {
  AttentionTask task;
  int64_t partial_offset;
};

// Items that one thread does one after the other.
struct WorkBundle {
  int32_t begin, end;
};

struct WorkPlan {
  std::vector<WorkItem> items;
  std::vector<WorkBundle> bundles;
  std::vector<FoldItem> folds;
  int64_t partial_floats = 0;
};
thread_local WorkPlan reused_plan;

int check(const PagedAttentionParams& p) {
  if (p.num_query_heads <= 0 || p.num_kv_heads <= 0 || p.num_query_heads % p.num_kv_heads != 0) {
    return fail("num_query_heads %d is not a multiple of num_kv_heads %d", p.num_query_heads, p.num_kv_heads);
  }
  if (p.kv_dtype != KvDType::kActivation && p.kv_dtype != KvDType::kFp8E4M3 && p.kv_dtype != KvDType::kFp8E5M2) {
    return fail("kv_dtype %d is not supported: 0 (the activations'), 1 (e4m3), 2 (e5m2) are",
                static_cast<int>(p.kv_dtype));
  }
  if (p.block_size != 8 && p.block_size != 16 && p.block_size != 32 && p.block_size != 64) {
    return fail("block_size %d is not supported: 8, 16, 32, 64 are", p.block_size);
  }
  for (int32_t b = 0; b < p.num_seqs; ++b) {
    const int64_t row = p.seq_slots != nullptr ? p.seq_slots[b] : b;
    if (row < 0 || row >= p.num_table_rows) {
      return fail("seq_slots[%d] is %lld, but block_tables has %lld rows", b, static_cast<long long>(row),
                  static_cast<long long>(p.num_table_rows));
    }
    const int32_t num_new = p.query_start[b + 1] - p.query_start[b];
    if (num_new < 0 || p.query_start[b] < 0 || p.query_start[b + 1] > p.num_tokens) {
      return fail("query_start[%d..%d] is %d, %d: not ascending within %lld tokens", b, b + 1, p.query_start[b],
                  p.query_start[b + 1], static_cast<long long>(p.num_tokens));
    }
    if (num_new == 0) continue;
    const int32_t context = p.context_lens[b];
    if (context < num_new || context > p.max_blocks * p.block_size) {
      return fail(
          "context_lens[%d] is %d: it must lie between the sequence's %d new tokens and the %lld that its block "
          "table can hold",
          b, context, num_new, static_cast<long long>(p.max_blocks * p.block_size));
    }
    const int32_t* table = p.block_tables + row * p.block_table_stride;
    const int32_t num_blocks = (context + p.block_size - 1) / p.block_size;
    // Pages that a sliding window has left behind may have been given back.
    const int32_t first_seen = p.window >= 0 ? std::max(0, context - num_new - p.window + 1) / p.block_size : 0;
    bool valid = true;
    for (int32_t i = first_seen; i < num_blocks; ++i) valid &= table[i] >= 0 && table[i] < p.num_blocks;
    if (!valid) {
      return fail("block_tables row %lld has an entry outside the cache's %lld blocks", static_cast<long long>(row),
                  static_cast<long long>(p.num_blocks));
    }
  }
  return 0;
}

void trace(const PagedAttentionParams& p) {
  if (p.num_seqs == 0) return;
  std::string line = "PagedAttentionKernel: block_table=[";
  const int64_t row = p.seq_slots != nullptr ? p.seq_slots[0] : 0;
  const int32_t num_blocks = (p.context_lens[0] + p.block_size - 1) / p.block_size;
  for (int32_t i = 0; i < num_blocks; ++i) {
    if (i != 0) line += ',';
    line += std::to_string(p.block_tables[row * p.block_table_stride + i]);
  }
  line += "], context_len=[";
  for (int32_t b = 0; b < p.num_seqs; ++b) {
    if (b != 0) line += ',';
    line += std::to_string(p.context_lens[b]);
  }
  line += "], block_size=" + std::to_string(p.block_size) + "\n";
  std::fputs(line.c_str(), stderr);
}

// Rows of a tile: as many as it may have, unless that left too few tiles for the threads.
int32_t tile_rows(const PagedAttentionParams& p, const AttentionSizes& sizes, int threads) {
  constexpr int32_t kLeastRows = 64;
  constexpr int64_t kTilesPerThread = 4;
  if (threads == 1 || sizes.tile_rows <= kLeastRows) return sizes.tile_rows;
  int64_t num_rows = 0;
  for (int32_t b = 0; b < p.num_seqs; ++b) num_rows += p.query_start[b + 1] - p.query_start[b];
  const int64_t share = num_rows * p.num_query_heads / (threads * kTilesPerThread);
  const int64_t whole = (share + kLeastRows - 1) / kLeastRows * kLeastRows;
  return static_cast<int32_t>(std::clamp<int64_t>(whole, kLeastRows, sizes.tile_rows));
}

// Calls the functor for each tile of each sequence and KV head, with its cost in (row, key) pairs. Of a sequence the
// last tiles see most keys and come first: threads that run out of tiles then wait for a small one.
template <typename Functor>
void for_each_tile(const PagedAttentionParams& p, int32_t tile_rows, Functor functor) {
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  for (int32_t b = 0; b < p.num_seqs; ++b) {
    const int32_t num_new = p.query_start[b + 1] - p.query_start[b];
    if (num_new == 0) continue;
    const int32_t first_position = p.context_lens[b] - num_new;
    const int32_t num_rows = num_new * group;
    for (int32_t first_row = (num_rows - 1) / tile_rows * tile_rows; first_row >= 0; first_row -= tile_rows) {
      const int32_t rows = std::min(tile_rows, num_rows - first_row);
      const int32_t first = first_position + first_row / group;
      const int32_t end_key = first_position + (first_row + rows - 1) / group + 1;
      const int32_t begin_key = p.window >= 0 ? std::max(0, first - p.window + 1) : 0;
      const int32_t first_partition = begin_key / kPartitionKeys;
      const int32_t num_partitions = (end_key - 1) / kPartitionKeys + 1 - first_partition;
      const int64_t cost = int64_t{rows} * (end_key - begin_key);
      for (int32_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        functor(AttentionTask{b, kv_head, first_row, rows, first_partition, num_partitions}, cost);
      }
    }
  }
}

// Bundles small items, so that keys of the next one can be fetched while one is worked on.
class Bundler {
 public:
  Bundler(WorkPlan& plan, int64_t most_cost) : plan_(plan), most_cost_(most_cost) { plan_.bundles.clear(); }

  void add(const WorkItem& item, int64_t cost) {
    const auto index = static_cast<int32_t>(plan_.items.size());
    if (plan_.bundles.empty() || cost_ + cost > most_cost_) {
      plan_.bundles.push_back({index, index});
      cost_ = 0;
    }
    plan_.items.push_back(item);
    plan_.bundles.back().end = index + 1;
    cost_ += cost;
  }

 private:
  WorkPlan& plan_;
  const int64_t most_cost_;
  int64_t cost_ = 0;
};

// A tile is split over its partitions where it is too large a share of the whole; the result is the same either way.
void make_plan(const PagedAttentionParams& p, const AttentionSizes& sizes, int threads, WorkPlan& plan) {
  plan.items.clear();
  plan.folds.clear();
  plan.partial_floats = 0;
  int64_t total_cost = 0;
  const int32_t rows = tile_rows(p, sizes, threads);
  for_each_tile(p, rows, [&](const AttentionTask&, int64_t cost) { total_cost += cost; });
  Bundler bundler(plan, threads == 1 ? total_cost : total_cost / (int64_t{threads} * kBundlesPerThread));
  const int64_t largest_cost = threads == 1 ? total_cost : total_cost / (int64_t{threads} * 4);
  for_each_tile(p, rows, [&](const AttentionTask& task, int64_t cost) {
    if (task.num_partitions == 1 || cost <= largest_cost || total_cost <= kInlineWork) {
      bundler.add({task, -1}, cost);
      return;
    }
    plan.folds.push_back({task, plan.partial_floats});
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      AttentionTask part = task;
      part.first_partition += i;
      part.num_partitions = 1;
      bundler.add({part, plan.partial_floats}, cost / task.num_partitions);
      plan.partial_floats += sizes.partial_floats(task.num_rows);
    }
  });
  if (total_cost <= kInlineWork) plan.partial_floats = -1;
}

template <typename Body>
void run_chunks(int64_t count, bool inline_only, Body body) {
  if (inline_only || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  parallel_for(count, [&](int64_t i, int) { body(i); });
}

int run(const PagedAttentionParams& p) {
  const KernelTable& table = kernel_table();
  const AttentionSizes sizes = table.attention_sizes(p);
  if (sizes.scratch_bytes == 0) {
    return fail("head_size %d is not supported: 64, 80, 96, 112, 128, 192, 256 are", p.head_size);
  }
  WorkPlan& plan = reused_plan;
  make_plan(p, sizes, num_threads(), plan);
  const bool inline_only = plan.partial_floats < 0;
  float* partials = nullptr;
  if (plan.partial_floats > 0) {
    partials = static_cast<float*>(partial_buffer.reserve(plan.partial_floats * static_cast<int64_t>(sizeof(float))));
    if (partials == nullptr) return fail("out of memory: %lld floats", static_cast<long long>(plan.partial_floats));
  }
  run_chunks(static_cast<int64_t>(plan.bundles.size()), inline_only, [&](int64_t b) {
    const WorkBundle bundle = plan.bundles[static_cast<size_t>(b)];
    const WorkItem* items = plan.items.data();
    void* scratch = task_scratch.reserve(sizes.scratch_bytes);
    for (int32_t i = bundle.begin; i < bundle.end; ++i) {
      const NearTasks near{i > bundle.begin ? &items[i - 1].task : nullptr,
                           i + 1 < bundle.end ? &items[i + 1].task : nullptr};
      float* target = items[i].partial_offset >= 0 ? partials + items[i].partial_offset : nullptr;
      table.attention_task(p, items[i].task, near, target, scratch);
    }
  });
  run_chunks(static_cast<int64_t>(plan.folds.size()), inline_only, [&](int64_t i) {
    const FoldItem& item = plan.folds[static_cast<size_t>(i)];
    table.attention_fold(p, item.task, partials + item.partial_offset, task_scratch.reserve(sizes.scratch_bytes));
  });
  return 0;
}

bool tracing() {
  static const bool enabled = [] {
    const char* value = std::getenv("PAGEMILL_TRACE_KERNELS");
    return value != nullptr && *value != '\0' && *value != '0';
  }();
  return enabled;
}

}  // namespace
}  // namespace pagemill

extern "C" int pagemill_paged_attention(const pagemill::PagedAttentionParams* params) {
  using namespace pagemill;
  if (const int error = check(*params)) return error;
  if (tracing()) trace(*params);
  return run(*params);
}
