// The matrix product of a warp group (wgmma): 64 rows, float32 sums in registers, 16 columns of A and rows of B a step.
//
// B and, for scores, A lie in shared memory in swizzled tiles that a descriptor names. The sums of a product in flight
// may not be touched: hold_registers() keeps the compiler from moving accesses across the points where it is called.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace pagemill::cuda::wgmma {

// A tile whose rows are cut into chunks as wide as the swizzle, 8 rows of a chunk to an atom. Byte distances: to the
// next chunk (read where the tile is multiplied along its rows, as V is), to the next 8 rows.
template <int kSwizzleBytes>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, int chunk_distance, int row_group_distance) {
  constexpr uint64_t kLayout = kSwizzleBytes == 128 ? 1 : kSwizzleBytes == 64 ? 2 : 3;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(chunk_distance >> 4) << 16 |
         static_cast<uint64_t>(row_group_distance >> 4) << 32 | kLayout << 62;
}

template <int kRegisters>
__device__ __forceinline__ void hold_registers(float (&r)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void hold_registers(uint32_t (&r)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A copy that the compiler cannot turn into another name: the left factor of a product in flight must stay where it is.
template <int kRegisters>
__device__ __forceinline__ void copy_registers(uint32_t (&to)[kRegisters], const uint32_t (&from)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(to[i]) : "r"(from[i]) : "memory");
}

// Before the first product that reads registers written by other instructions.
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most so many committed groups are in flight.
template <int kInFlight>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// An asm string and its operands cannot be made by templates, hence these.
#define PAGEMILL_SUMS_8(d, i)                                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PAGEMILL_SUMS_32(d, i) \
  PAGEMILL_SUMS_8(d, i), PAGEMILL_SUMS_8(d, i + 8), PAGEMILL_SUMS_8(d, i + 16), PAGEMILL_SUMS_8(d, i + 24)

#define PAGEMILL_NUMBERS_64                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PAGEMILL_NUMBERS_80                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39}"
#define PAGEMILL_NUMBERS_96                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define PAGEMILL_NUMBERS_112                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55}"
#define PAGEMILL_NUMBERS_128                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define PAGEMILL_NUMBERS_192                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, " \
  "%73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
  "%91, %92, %93, %94, %95}"
#define PAGEMILL_NUMBERS_256                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, " \
  "%73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
  "%91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "    \
  "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
  "%122, %123, %124, %125, %126, %127}"

#define PAGEMILL_PRODUCT_SHARED(N, TYPE, NUMBERS, A, B, PREDICATE, ...)                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" PREDICATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" N \
               "k16.f32." TYPE "." TYPE " " NUMBERS ", %" A ", %" B ", p, 1, 1, 0, 0;\n}\n"               \
               : __VA_ARGS__                                                                              \
               : "l"(a), "l"(b), "r"(accumulate))

#define PAGEMILL_PRODUCT_REGISTERS(N, TYPE, NUMBERS, A0, A1, A2, A3, B, PREDICATE, ...)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" PREDICATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" N              \
               "k16.f32." TYPE "." TYPE " " NUMBERS ", {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 1;\n}\n" \
               : __VA_ARGS__                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// d (+)= A Bᵀ: A is 64 x 16, B is kColumns x 16, both rows of shared memory. Without `accumulate` d is overwritten.
template <typename T, int kColumns>
__device__ __forceinline__ void product_of_rows(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kColumns == 80 && kIsBf16) {
    PAGEMILL_PRODUCT_SHARED("80", "bf16", PAGEMILL_NUMBERS_80, "40", "41", "42", PAGEMILL_SUMS_32(d, 0),
                            PAGEMILL_SUMS_8(d, 32));
  } else if constexpr (kColumns == 80) {
    PAGEMILL_PRODUCT_SHARED("80", "f16", PAGEMILL_NUMBERS_80, "40", "41", "42", PAGEMILL_SUMS_32(d, 0),
                            PAGEMILL_SUMS_8(d, 32));
  } else if constexpr (kColumns == 128 && kIsBf16) {
    PAGEMILL_PRODUCT_SHARED("128", "bf16", PAGEMILL_NUMBERS_128, "64", "65", "66", PAGEMILL_SUMS_32(d, 0),
                            PAGEMILL_SUMS_32(d, 32));
  } else if constexpr (kColumns == 128) {
    PAGEMILL_PRODUCT_SHARED("128", "f16", PAGEMILL_NUMBERS_128, "64", "65", "66", PAGEMILL_SUMS_32(d, 0),
                            PAGEMILL_SUMS_32(d, 32));
  } else {
    static_assert(kColumns == 0, "no product of this width");
  }
}

// d (+)= A B: A is 64 x 16, in registers, B is 16 x kColumns, rows of shared memory.
template <typename T, int kColumns>
__device__ __forceinline__ void product(float (&d)[kColumns / 2], const uint32_t* a, uint64_t b, int accumulate) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kColumns == 64 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("64", "bf16", PAGEMILL_NUMBERS_64, "32", "33", "34", "35", "36", "37",
                               PAGEMILL_SUMS_32(d, 0));
  } else if constexpr (kColumns == 64) {
    PAGEMILL_PRODUCT_REGISTERS("64", "f16", PAGEMILL_NUMBERS_64, "32", "33", "34", "35", "36", "37",
                               PAGEMILL_SUMS_32(d, 0));
  } else if constexpr (kColumns == 80 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("80", "bf16", PAGEMILL_NUMBERS_80, "40", "41", "42", "43", "44", "45",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32));
  } else if constexpr (kColumns == 80) {
    PAGEMILL_PRODUCT_REGISTERS("80", "f16", PAGEMILL_NUMBERS_80, "40", "41", "42", "43", "44", "45",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32));
  } else if constexpr (kColumns == 96 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("96", "bf16", PAGEMILL_NUMBERS_96, "48", "49", "50", "51", "52", "53",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32), PAGEMILL_SUMS_8(d, 40));
  } else if constexpr (kColumns == 96) {
    PAGEMILL_PRODUCT_REGISTERS("96", "f16", PAGEMILL_NUMBERS_96, "48", "49", "50", "51", "52", "53",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32), PAGEMILL_SUMS_8(d, 40));
  } else if constexpr (kColumns == 112 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("112", "bf16", PAGEMILL_NUMBERS_112, "56", "57", "58", "59", "60", "61",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32), PAGEMILL_SUMS_8(d, 40),
                               PAGEMILL_SUMS_8(d, 48));
  } else if constexpr (kColumns == 112) {
    PAGEMILL_PRODUCT_REGISTERS("112", "f16", PAGEMILL_NUMBERS_112, "56", "57", "58", "59", "60", "61",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_8(d, 32), PAGEMILL_SUMS_8(d, 40),
                               PAGEMILL_SUMS_8(d, 48));
  } else if constexpr (kColumns == 128 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("128", "bf16", PAGEMILL_NUMBERS_128, "64", "65", "66", "67", "68", "69",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32));
  } else if constexpr (kColumns == 128) {
    PAGEMILL_PRODUCT_REGISTERS("128", "f16", PAGEMILL_NUMBERS_128, "64", "65", "66", "67", "68", "69",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32));
  } else if constexpr (kColumns == 192 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("192", "bf16", PAGEMILL_NUMBERS_192, "96", "97", "98", "99", "100", "101",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32), PAGEMILL_SUMS_32(d, 64));
  } else if constexpr (kColumns == 192) {
    PAGEMILL_PRODUCT_REGISTERS("192", "f16", PAGEMILL_NUMBERS_192, "96", "97", "98", "99", "100", "101",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32), PAGEMILL_SUMS_32(d, 64));
  } else if constexpr (kColumns == 256 && kIsBf16) {
    PAGEMILL_PRODUCT_REGISTERS("256", "bf16", PAGEMILL_NUMBERS_256, "128", "129", "130", "131", "132", "133",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32), PAGEMILL_SUMS_32(d, 64),
                               PAGEMILL_SUMS_32(d, 96));
  } else if constexpr (kColumns == 256) {
    PAGEMILL_PRODUCT_REGISTERS("256", "f16", PAGEMILL_NUMBERS_256, "128", "129", "130", "131", "132", "133",
                               PAGEMILL_SUMS_32(d, 0), PAGEMILL_SUMS_32(d, 32), PAGEMILL_SUMS_32(d, 64),
                               PAGEMILL_SUMS_32(d, 96));
  } else {
    static_assert(kColumns == 0, "no product of this width");
  }
}

#undef PAGEMILL_PRODUCT_REGISTERS
#undef PAGEMILL_PRODUCT_SHARED
#undef PAGEMILL_SUMS_32
#undef PAGEMILL_SUMS_8
#undef PAGEMILL_NUMBERS_64
#undef PAGEMILL_NUMBERS_80
#undef PAGEMILL_NUMBERS_96
#undef PAGEMILL_NUMBERS_112
#undef PAGEMILL_NUMBERS_128
#undef PAGEMILL_NUMBERS_192
#undef PAGEMILL_NUMBERS_256

}  // namespace pagemill::cuda::wgmma
