// out = x · Wᵀ for at most 16 rows of x: a stream of the weights at memory bandwidth.
//
// A thread block owns consecutive outputs and all their inputs, so blocks never wait for one another. Chunks of inputs
// go to its warps in turn; each warp streams its own chunks through a ring in shared memory, refilled by itself, and
// the warps' sums are joined in a fixed order once per tile of outputs. Copies follow memory: a warp reads whole lines
// of consecutive weights, and swizzled rows let it read them back as operands of tensor cores without bank conflicts.
// The weights are the operand with 16 rows, x the one with 8 columns, so a row's bits depend neither on the other rows
// nor on their number.
//
// For a gated MLP half of a tile's rows are of the gate, half are those of `up` for the same outputs, and what is
// written is silu(gate) * up, from sums in float32.
//
// A kernel fills its rings with weights while the kernel before it in the stream still runs; x is read after that one's
// end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pagemill::cuda {

template <typename T>
struct SkinnyArguments {
  T* out;           // [num_rows, num_outputs]
  const T* x;       // [num_rows, num_inputs]
  const T* weight;  // [num_outputs, num_inputs]; gated: the gate's rows, then as many of up
  int64_t out_stride, x_stride;
  int32_t num_rows, num_outputs, num_inputs;
  int32_t num_tiles, tile_outputs;  // of a block; a tile has at most kTileOutputs
};

// kRowTiles: of 16 rows of weights. kColumnTiles: of 8 rows of x.
template <typename T, bool kIsGated_, int kRowTiles_, int kColumnTiles_, int kWarps_, int kSharedLimit>
struct SkinnyTraits {
  using Element = T;
  static constexpr bool kIsGated = kIsGated_;
  static constexpr int kRowTiles = kRowTiles_, kColumnTiles = kColumnTiles_;
  static constexpr int kTileOutputs = 16 * kRowTiles / (kIsGated ? 2 : 1);
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  static constexpr int kSteps = 2;            // of 32 inputs, two products of tensor cores each, in a chunk
  static constexpr int kChunk = 32 * kSteps;  // inputs of a stage: whole lines of 128 bytes
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kWeightBytes = 16 * kRowTiles * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + 8 * kColumnTiles * kRowBytes;
  // Sums of a warp: a column of outputs for each row of x. The padding keeps a warp's stores in different banks.
  static constexpr int kSumPitch = 16 * kRowTiles + 4;
  static constexpr int kWarpSums = 8 * kColumnTiles * kSumPitch;
  static constexpr int kSumBytes = kWarps * kWarpSums * 4;
  static constexpr int kDepth = (kSharedLimit - kSumBytes) / (kWarps * kStageBytes);
  static_assert(kDepth >= 2, "a ring of one stage never has copies in flight while it is read");
  static constexpr int kSharedBytes = kWarps * kDepth * kStageBytes + kSumBytes;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, or zeros without a look at `from`.
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void* from, bool is_inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_inside ? 16 : 0)
               : "memory");
}

// The same for data that is read once: first to leave the cache, so that activations stay.
__device__ __forceinline__ void copy_or_zero_once(uint32_t to, const void* from, bool is_inside, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(is_inside ? 16 : 0), "l"(policy)
               : "memory");
}

// Past the L1 cache, and not before what stands in front of it.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
  uint4 data;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(from)
               : "memory");
  return data;
}

__device__ __forceinline__ void store_shared(uint32_t to, const uint4& data) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(data.x), "r"(data.y), "r"(data.z), "r"(data.w)
               : "memory");
}

// The kernels before this one in the stream have finished; the next one may take its place beside this one.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1, __nv_bfloat16 /*type*/) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1, __half /*type*/) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void store_rounded(__nv_bfloat16* to, float value) { *to = __float2bfloat16(value); }
__device__ __forceinline__ void store_rounded(__half* to, float value) { *to = __float2half(value); }

__device__ __forceinline__ float silu(float x) { return x * __fdividef(1.0f, 1.0f + __expf(-x)); }

// Copies a warp's stages in the order in which it consumes them: chunks of the first tile, of the next, and so on.
template <typename Traits>
class SkinnyLoader {
  using T = typename Traits::Element;
  static constexpr int kLanesOfRow = Traits::kRowBytes / 16, kRowsOfCopy = 32 / kLanesOfRow;
  static constexpr int kWeightCopies = 16 * Traits::kRowTiles / kRowsOfCopy;
  static constexpr int kXCopies = 8 * Traits::kColumnTiles / kRowsOfCopy;

 public:
  __device__ SkinnyLoader(const SkinnyArguments<T>& arguments, char* ring, int first, int end, int warp, int lane)
      : a_(arguments), row_(lane / kLanesOfRow), policy_(evict_first_policy()) {
    const int piece = lane % kLanesOfRow;
    input_ = warp * Traits::kChunk + 8 * piece;
    weight_ = a_.weight + static_cast<int64_t>(first + row_) * a_.num_inputs + input_;
    x_ = a_.x + row_ * a_.x_stride + input_;
    to_ = shared_address(ring) + row_ * Traits::kRowBytes + swizzled(row_, piece) * 16;
    outputs_left_ = end - first - row_;
    num_chunks_ = num_chunks_of(a_.num_inputs, warp);
    tiles_left_ = num_chunks_ > 0 ? a_.num_tiles : 0;
  }

  static __device__ int num_chunks_of(int num_inputs, int warp) {
    const int chunks = (num_inputs + Traits::kChunk - 1) / Traits::kChunk;
    return chunks > warp ? (chunks - warp + Traits::kWarps - 1) / Traits::kWarps : 0;
  }

  // Where a piece of 16 bytes lies in its row. Lanes read eight pieces at a time, four of an even and four of an odd
  // row.
  static __device__ int swizzled(int row, int piece) { return piece ^ ((row & 1) << 2); }

  // Starts the copies of weights for the whole ring, a group for each stage.
  __device__ __forceinline__ void fill_with_weights() {
    // Not unrolled: a second copy of this code would delay the first loads by the time to fetch it.
#pragma unroll 1
    for (int stage = 0; stage < Traits::kDepth; ++stage) {
      if (tiles_left_ > 0) {
        copy_weights();
        advance();
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }

  // Reads x for the stages of fill_with_weights(), all of it at once. The lanes' stores are for one another.
  __device__ __forceinline__ void fill_with_x() const {
    uint4 pieces[Traits::kDepth][kXCopies];
    int chunk = 0;
#pragma unroll
    for (int stage = 0; stage < Traits::kDepth; ++stage) {
      const int input = chunk * (Traits::kWarps * Traits::kChunk);
#pragma unroll
      for (int i = 0; i < kXCopies; ++i) {
        pieces[stage][i] = make_uint4(0, 0, 0, 0);
        if (input_ + input < a_.num_inputs && i * kRowsOfCopy + row_ < a_.num_rows) {
          pieces[stage][i] = load_fresh(x_ + i * kRowsOfCopy * a_.x_stride + input);
        }
      }
      if (++chunk >= num_chunks_) chunk = 0;
    }
#pragma unroll
    for (int stage = 0; stage < Traits::kDepth; ++stage) {
#pragma unroll
      for (int i = 0; i < kXCopies; ++i) {
        store_shared(to_ + stage * Traits::kStageBytes + Traits::kWeightBytes + i * 512, pieces[stage][i]);
      }
    }
  }

  // Starts the copies of the next stage, if there is one. Always closes a group, so that groups count stages.
  __device__ __forceinline__ void start_next() {
    if (tiles_left_ > 0) {
      copy_weights();
      copy_x();
      advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  __device__ __forceinline__ void copy_weights() {
    const int input = chunk_ * (Traits::kWarps * Traits::kChunk);
    const bool is_inside = input_ + input < a_.num_inputs;
    const int outputs = min(outputs_left_, a_.tile_outputs - row_);
    const uint32_t to = to_ + slot_ * Traits::kStageBytes;
    constexpr int kCopiesOfPart = Traits::kTileOutputs / kRowsOfCopy;  // the whole, or gate and up
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int output = (i % kCopiesOfPart) * kRowsOfCopy;
      const int64_t part = static_cast<int64_t>(i / kCopiesOfPart) * a_.num_outputs;
      const T* from = weight_ + (part + output) * a_.num_inputs + input;
      copy_or_zero_once(to + i * 512, from, is_inside && output < outputs, policy_);
    }
  }

  __device__ __forceinline__ void copy_x() {
    const int input = chunk_ * (Traits::kWarps * Traits::kChunk);
    const bool is_inside = input_ + input < a_.num_inputs;
    const uint32_t to = to_ + slot_ * Traits::kStageBytes + Traits::kWeightBytes;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const T* from = x_ + i * kRowsOfCopy * a_.x_stride + input;
      copy_or_zero(to + i * 512, from, is_inside && i * kRowsOfCopy + row_ < a_.num_rows);
    }
  }

  __device__ __forceinline__ void advance() {
    slot_ = slot_ + 1 == Traits::kDepth ? 0 : slot_ + 1;
    if (++chunk_ < num_chunks_) return;
    chunk_ = 0;
    --tiles_left_;
    outputs_left_ -= a_.tile_outputs;
    weight_ += static_cast<int64_t>(a_.tile_outputs) * a_.num_inputs;
  }

  const SkinnyArguments<T>& a_;
  const int row_;  // of the lane in each copy
  const uint64_t policy_;
  const T* weight_;  // of the lane in the tile being copied
  const T* x_;
  uint32_t to_;
  int input_, outputs_left_, num_chunks_, tiles_left_;
  int chunk_ = 0, slot_ = 0;
};

// Adds the products of a stage. Tensor cores want inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 from lane t of four; any
// order does that is the same for weights and x, so a lane takes eight consecutive ones and feeds two products.
template <typename Traits>
__device__ __forceinline__ void add_stage(float (&sums)[Traits::kRowTiles][Traits::kColumnTiles][4], const char* stage,
                                          int lane) {
  using T = typename Traits::Element;
  const int group = lane >> 2;
  const char* lane_row = stage + group * Traits::kRowBytes;
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    const char* piece = lane_row + SkinnyLoader<Traits>::swizzled(group, 4 * step + (lane & 3)) * 16;
    uint4 x[Traits::kColumnTiles];
#pragma unroll
    for (int n = 0; n < Traits::kColumnTiles; ++n) {
      x[n] = *reinterpret_cast<const uint4*>(piece + Traits::kWeightBytes + 8 * n * Traits::kRowBytes);
    }
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles; ++i) {
      const uint4 low = *reinterpret_cast<const uint4*>(piece + 16 * i * Traits::kRowBytes);
      const uint4 high = *reinterpret_cast<const uint4*>(piece + (16 * i + 8) * Traits::kRowBytes);
#pragma unroll
      for (int n = 0; n < Traits::kColumnTiles; ++n) {
        multiply(sums[i][n], low.x, high.x, low.y, high.y, x[n].x, x[n].y, T());
        multiply(sums[i][n], low.z, high.z, low.w, high.w, x[n].z, x[n].w, T());
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void write_warp_sums(float* to, int num_rows, int lane,
                                                float (&sums)[Traits::kRowTiles][Traits::kColumnTiles][4]) {
#pragma unroll
  for (int n = 0; n < Traits::kColumnTiles; ++n) {
    const int row = 8 * n + 2 * (lane & 3);
    if (row >= num_rows) continue;
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles; ++i) {
      float* column = to + row * Traits::kSumPitch + 16 * i + (lane >> 2);
      column[0] = sums[i][n][0];
      column[8] = sums[i][n][2];
      column[Traits::kSumPitch] = sums[i][n][1];
      column[Traits::kSumPitch + 8] = sums[i][n][3];
    }
  }
}

// The sum over the warps, in their order.
template <typename Traits>
__device__ __forceinline__ float sum_of_warps(const float* sums) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < Traits::kWarps; ++warp) sum += sums[warp * Traits::kWarpSums];
  return sum;
}

// Joins the warps' sums of a tile and writes outputs first .. first + num_outputs - 1.
template <typename Traits>
__device__ __forceinline__ void join_warps(const SkinnyArguments<typename Traits::Element>& a, const float* sums,
                                           int first, int num_outputs) {
#pragma unroll 1
  for (int i = threadIdx.x; i < a.num_rows * Traits::kTileOutputs; i += Traits::kThreads) {
    const int row = i / Traits::kTileOutputs, output = i % Traits::kTileOutputs;
    const float* own = sums + row * Traits::kSumPitch + output;
    float value = sum_of_warps<Traits>(own);
    if constexpr (Traits::kIsGated) value = silu(value) * sum_of_warps<Traits>(own + Traits::kTileOutputs);
    if (output < num_outputs) store_rounded(a.out + row * a.out_stride + first + output, value);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    skinny_linear_kernel(const __grid_constant__ SkinnyArguments<typename Traits::Element> a) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* ring = shared + warp * (Traits::kDepth * Traits::kStageBytes);
  float* sums = reinterpret_cast<float*>(shared + Traits::kWarps * Traits::kDepth * Traits::kStageBytes);
  // Blocks differ by one output at most.
  const int block = blockIdx.x, num_blocks = gridDim.x;
  const int share = a.num_outputs / num_blocks, rest = a.num_outputs - share * num_blocks;
  const int first = block * share + min(block, rest), end = first + share + (block < rest ? 1 : 0);

  SkinnyLoader<Traits> loader(a, ring, first, end, warp, lane);
  loader.fill_with_weights();
  wait_for_previous_kernel();
  loader.fill_with_x();

  const int num_chunks = SkinnyLoader<Traits>::num_chunks_of(a.num_inputs, warp);
  int slot = 0;
#pragma unroll 1
  for (int tile = 0; tile < a.num_tiles; ++tile) {
    float tile_sums[Traits::kRowTiles][Traits::kColumnTiles][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      asm volatile("cp.async.wait_group %0;" ::"n"(Traits::kDepth - 1) : "memory");
      __syncwarp();  // the lanes copied for one another
      add_stage<Traits>(tile_sums, ring + slot * Traits::kStageBytes, lane);
      __syncwarp();  // all have read what the next copies overwrite
      loader.start_next();
      slot = slot + 1 == Traits::kDepth ? 0 : slot + 1;
    }
    if (tile > 0) __syncthreads();  // the sums of the tile before have been read
    write_warp_sums<Traits>(sums + warp * Traits::kWarpSums, a.num_rows, lane, tile_sums);
    __syncthreads();
    const int tile_first = first + tile * a.tile_outputs;
    join_warps<Traits>(a, sums, tile_first, min(a.tile_outputs, end - tile_first));
  }
}

}  // namespace pagemill::cuda
