// A consumer warp group: 64 query rows of each work item.
//
// One step issues the scores of the next key tile, then the product of this tile's weights with V, and computes the
// next weights while the latter runs. Steps go on over the end of an item: its last product runs beside the first
// scores of the next item. Keys are taken from the last tile to the first, so that masking comes first.
#pragma once

#include <cstddef>

#include "attention_wgmma_product.cuh"
#include "attention_wgmma_ptx.cuh"
#include "attention_wgmma_softmax.cuh"
#include "attention_wgmma_traits.cuh"

namespace pagemill::cuda::wgmma {

// What a step must know of its item.
struct Span {
  int32_t head, first_position, begin_key, end_key;
};

template <class Traits>
class Consumer {
  using T = typename Traits::T;
  using Scores = typename Traits::Scores;
  static constexpr int kKeyTile = Traits::kKeyTile;
  static constexpr int kScores = kKeyTile / 2;  // registers of 64 rows of so many columns
  static constexpr int kOutputs = Traits::kHeadSize / 2;
  static constexpr int kSteps = Traits::kHeadSize / 16;
  // Named barriers; 0 is __syncthreads().
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 3;

 public:
  __device__ __forceinline__ Consumer(const KernelParams& params, Barriers& barriers, uint32_t shared, int group)
      : params_(params),
        barriers_(barriers),
        barrier_memory_(shared_address(&barriers)),
        shared_(shared),
        group_(group),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (group_ == kNumConsumers - 1) give_turn();
    Span span;
    while (begin_item(span)) {
      float scores[kScores], outputs[kOutputs], correction[2];
      uint32_t weights[kScores / 2], next_weights[kScores / 2];
      RowState state;
      int tile = last_tile(span), has_outputs = 0;
      wait_for_keys();
      issue_scores(scores);
      product_wait<0>();
      hold_registers(scores);
      release_keys();
      hide_unseen(scores, span, tile);
      weigh<T>(Scores::unit(params_), scores, state, weights, correction);
      while (true) {
        const bool is_last = tile == first_tile(span);
        Span next_span = span;
        int next_tile = tile - 1;
        if (is_last) {
          if constexpr (!Traits::kCrossesItems) break;
          queries_.advance();
          if (!begin_item(next_span)) break;
          next_tile = last_tile(next_span);
        }
        wait_for_keys();
        wait_for_turn();
        issue_scores(scores);
        wait_for_values(span, tile);
        issue_outputs(outputs, weights, has_outputs);
        give_turn();
        product_wait<1>();
        hold_registers(scores);
        release_keys();
        hide_unseen(scores, next_span, next_tile);
        const RowState ended = state;
        if (is_last) state = RowState{};
        const bool is_raised = weigh<T>(Scores::unit(params_), scores, state, next_weights, correction);
        // The wait stays behind the weights because of the branches in weigh(): within one block the compiler moves it
        // up.
        hold_registers(next_weights);
        product_wait<0>();
        hold_registers(outputs);
        hold_registers(weights);
        release_values();
        if (is_last) {
          end_item(outputs, ended, queries_.index ^ 1);
        } else if (is_raised) {
          rescale(outputs, correction);
        }
        has_outputs = is_last ? 0 : 1;
        copy_registers(weights, next_weights);
        span = next_span;
        tile = next_tile;
      }
      wait_for_values(span, tile);
      issue_outputs(outputs, weights, has_outputs);
      product_wait<0>();
      hold_registers(outputs);
      if constexpr (Traits::kCrossesItems) {
        end_item(outputs, state, queries_.index ^ 1);
        return;
      }
      release_values();
      end_item(outputs, state, queries_.index);
      queries_.advance();
    }
  }

 private:
  __device__ __forceinline__ static int first_tile(const Span& span) {
    return Scores::kIsPlain ? 0 : span.begin_key / kKeyTile;
  }
  __device__ __forceinline__ static int last_tile(const Span& span) { return (span.end_key - 1) / kKeyTile; }

  __device__ __forceinline__ uint32_t barrier_at(size_t offset, int index) const {
    return barrier_memory_ + static_cast<uint32_t>(offset) + index * 8;
  }
  __device__ __forceinline__ uint32_t query_memory(int index) const { return shared_ + index * Traits::kQueryBytes; }
  __device__ __forceinline__ uint32_t key_memory() const {
    return shared_ + Traits::kNumQueries * Traits::kQueryBytes + keys_.index * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t value_memory() const {
    return shared_ + Traits::kNumQueries * Traits::kQueryBytes +
           (Traits::kNumStages + values_.index) * Traits::kStageBytes;
  }

  // Byte distance of the 16 columns of a step from the first column of a row, before the swizzle.
  __device__ __forceinline__ static constexpr int step_bytes(int step, int chunk_bytes) {
    constexpr int kPerChunk = Traits::kChunk / 16;
    return step / kPerChunk * chunk_bytes + step % kPerChunk * 32;
  }

  // Address of this lane's row of the four matrices of 16 rows and 16 columns of this warp.
  __device__ __forceinline__ uint32_t query_matrices(int index, int step, int thread) const {
    const int row = group_ * kGroupRows + thread / 32 % 4 * 16 + thread % 16;
    return query_memory(index) + Traits::query_offset(row, 2 * step + thread % 32 / 16);
  }

  // Waits for the next item and its queries; false after the last one.
  __device__ __forceinline__ bool begin_item(Span& span) {
    barrier_wait(barrier_at(offsetof(Barriers, query_full), queries_.index), queries_.parity);
    const WorkItem& item = barriers_.items[queries_.index];
    if (item.num_queries == 0) return false;
    span = {item.head, item.first_position + group_ * kGroupRows, item.begin_key, item.end_key};
    return true;
  }

  // The other consumer's products run while this one computes weights, and the other way round.
  __device__ __forceinline__ void wait_for_turn() {
    named_barrier_sync(kTurnBarrier + group_, kNumConsumers * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn() {
    named_barrier_arrive(kTurnBarrier + 1 - group_, kNumConsumers * kGroupThreads);
  }

  __device__ __forceinline__ void wait_for_keys() {
    barrier_wait(barrier_at(offsetof(Barriers, key_full), keys_.index), keys_.parity);
  }
  __device__ __forceinline__ void release_keys() {
    if (lane_ == 0) barrier_arrive(barrier_at(offsetof(Barriers, key_empty), keys_.index));
    keys_.advance();
  }

  // Weights of unseen keys are 0, but what the cache holds there may be no number: such rows of V become 0 too.
  __device__ __forceinline__ void wait_for_values(const Span& span, int tile) {
    barrier_wait(barrier_at(offsetof(Barriers, value_full), values_.index), values_.parity);
    const int begin = Scores::kIsPlain ? 0 : span.begin_key - tile * kKeyTile, end = span.end_key - tile * kKeyTile;
    if (begin > 0 || end < kKeyTile) clear_values(begin, end);
  }
  __device__ __forceinline__ void clear_values(int begin, int end) {
    constexpr int kPerChunk = Traits::kSwizzleBytes / 16, kPerRow = Traits::kRowBytes / 16;
    const uint32_t memory = value_memory();
#pragma unroll 1
    for (int i = reread_thread() % kGroupThreads; i < kKeyTile * kPerRow; i += kGroupThreads) {
      const int row = i / kPerRow, column = i % kPerRow;
      if (row >= begin && row < end) continue;
      clear_shared_16(memory + row / 8 * Traits::kRowGroupBytes + column / kPerChunk * Traits::kAtomBytes +
                      row % 8 * Traits::kSwizzleBytes + column % kPerChunk * 16);
    }
    fence_async_proxy();
    // The other group clears the same rows for itself.
    named_barrier_sync(kGroupBarrier + group_, kGroupThreads);
  }
  __device__ __forceinline__ void release_values() {
    if (lane_ == 0) barrier_arrive(barrier_at(offsetof(Barriers, value_empty), values_.index));
    values_.advance();
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) {
    const uint64_t keys = tile_descriptor<Traits::kSwizzleBytes>(key_memory(), 0, Traits::kRowGroupBytes);
    const uint64_t queries = tile_descriptor<Traits::kSwizzleBytes>(
        query_memory(queries_.index) + group_ * kGroupRows * Traits::kSwizzleBytes, 0, Traits::kAtomBytes);
    hold_registers(scores);
    product_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      product_of_rows<T, kKeyTile>(scores, queries + step_bytes(step, Traits::kQueryChunkBytes) / 16,
                                   keys + step_bytes(step, Traits::kAtomBytes) / 16, step > 0);
    }
    product_commit();
  }

  __device__ __forceinline__ void issue_outputs(float (&outputs)[kOutputs], uint32_t (&weights)[kScores / 2],
                                                int has_outputs) {
    const uint64_t values =
        tile_descriptor<Traits::kSwizzleBytes>(value_memory(), Traits::kAtomBytes, Traits::kRowGroupBytes);
    hold_registers(outputs);
    hold_registers(weights);
    product_fence();
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      product<T, Traits::kHeadSize>(outputs, weights + 4 * step, values + step * 2 * Traits::kRowGroupBytes / 16,
                                    step > 0 ? 1 : has_outputs);
    }
    product_commit();
  }

  __device__ __forceinline__ void hide_unseen(float (&scores)[kScores], const Span& span, int tile) const {
    const int first_key = tile * kKeyTile;
    const int position = span.first_position + warp_ * 16 + lane_ / 4;
    KeyRange seen;
    seen.end = position + 1 - first_key - lane_ % 4 * 2;
    seen.begin = Scores::kIsPlain || params_.window < 0 ? INT32_MIN : seen.end - params_.window;
    if constexpr (!Scores::kIsPlain) Scores::transform(params_, span.head, scores, 1 - seen.end);
    // Whether every row of the group sees the whole tile.
    const bool is_seen =
        first_key + kKeyTile - 1 <= span.first_position &&
        (Scores::kIsPlain || params_.window < 0 || first_key > span.first_position + kGroupRows - 1 - params_.window);
    if (!is_seen) mask<!Scores::kIsPlain>(scores, seen);
  }

  // Divides by the sums and writes the rows of the item that ended, by way of its queries' memory.
  __device__ __forceinline__ void end_item(float (&outputs)[kOutputs], RowState state, int index) {
    const WorkItem& item = barriers_.items[index];
    const int thread = reread_thread(), lane = thread % 32;
    const int first_row = group_ * kGroupRows + thread / 32 % 4 * 16;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float maximum = state.maximum[row] * Scores::unit(params_), sum = state.sum[row];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      factor[row] = 1.0f;
      if constexpr (!Scores::kIsPlain) factor[row] = Scores::add_sink(params_, item.head, maximum, sum);
      factor[row] = sum > 0.0f ? __fdividef(factor[row], sum) : 0.0f;
      const int tile_row = first_row + row * 8 + lane / 4;
      if (params_.lse != nullptr && lane % 4 == 0 && tile_row < item.num_queries) {
        const int64_t token = item.token + tile_row;
        params_.lse[token * params_.num_query_heads + item.head] = (maximum + __log2f(sum)) * kLn2;
      }
    }
    rescale(outputs, factor);
    // No warp of the group reads the queries any more.
    named_barrier_sync(kGroupBarrier + group_, kGroupThreads);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float* o = outputs + 8 * step;
      store_matrices(query_matrices(index, step, thread), pack<T>(o[0], o[1]), pack<T>(o[2], o[3]), pack<T>(o[4], o[5]),
                     pack<T>(o[6], o[7]));
    }
    __syncwarp();
    write_rows(item, index, first_row, lane);
  }

  // By way of shared memory, so that a row is written in whole lines.
  __device__ __forceinline__ void write_rows(const WorkItem& item, int index, int first_row, int lane) const {
    constexpr int kPerRow = Traits::kRowBytes / 16, kPerLane = kPerRow / 2;
    const uint32_t memory = query_memory(index);
    const int num_rows = item.num_queries - first_row;
    T* const out = static_cast<T*>(params_.out) + (item.token + first_row) * params_.out_token_stride +
                   item.head * params_.out_head_stride;
    uint4 numbers[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int unit = i * 32 + lane;
      numbers[i] = load_shared_16(memory + Traits::query_offset(first_row + unit / kPerRow, unit % kPerRow));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier_at(offsetof(Barriers, query_empty), index));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int unit = i * 32 + lane, row = unit / kPerRow;
      if (row < num_rows) store_global_16(out + row * params_.out_token_stride + unit % kPerRow * 8, numbers[i]);
    }
  }

  const KernelParams& params_;
  Barriers& barriers_;
  const uint32_t barrier_memory_, shared_;
  const int group_, warp_, lane_;
  RingPlace<Traits::kNumQueries> queries_;
  RingPlace<Traits::kNumStages> keys_, values_;
};

}  // namespace pagemill::cuda::wgmma
