// Every CPU kernel over a small grid of shapes, types and instruction sets, on memory that ends where the numbers end:
// run under sanitizers, a byte read or written too far is an error.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "pagemill/params.h"

namespace pagemill::test {

// Counts a failure and names the instruction set, unless `holds`.
void expect(bool holds, const char* what);
int num_failures();

enum class Memory {
  kHeap,     // which AddressSanitizer watches
  kGuarded,  // ends at a page that may not be touched: also stops tile loads, which the sanitizer does not see
};

// Elements without a byte to spare behind them.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count, Memory memory = Memory::kHeap) : count_(count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (memory == Memory::kHeap) {
      data_ = static_cast<T*>(std::malloc(bytes > 0 ? bytes : 1));
    } else {
      const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      mapped_bytes_ = (bytes + page - 1) / page * page + page;
      mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapping_ == MAP_FAILED) throw std::bad_alloc();
      char* guard = static_cast<char*>(mapping_) + mapped_bytes_ - page;
      if (mprotect(guard, page, PROT_NONE) != 0) throw std::bad_alloc();
      data_ = reinterpret_cast<T*>(guard - bytes);
    }
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_), 0, bytes);
  }
  ~Buffer() {
    if (mapping_ != nullptr) {
      munmap(mapping_, mapped_bytes_);
    } else {
      std::free(data_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  int64_t count_;
  T* data_ = nullptr;
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
};

// Eighths in [-1, 1]: exact in every format, those of 8 bits included, and after scaling by a power of two.
inline float eighth(int64_t i) { return static_cast<float>((i * 7919 + i / 5 * 104729 + 3) % 17 - 8) / 8; }

// A number of one of the types of tensors.
inline void write_number(void* base, int64_t i, DType dtype, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(base) + i * 4, &value, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (dtype == DType::kFloat16) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    half = static_cast<uint16_t>((bits >> 16 & 0x8000u) | (magnitude == 0 ? 0 : (magnitude - 0x38000000u) >> 13));
    if (magnitude > 0x7f800000u) half = 0x7e00;
  }
  std::memcpy(static_cast<char*>(base) + i * 2, &half, 2);
}

inline double read_number(const void* base, int64_t i, DType dtype) {
  float value;
  if (dtype == DType::kFloat32) {
    std::memcpy(&value, static_cast<const char*>(base) + i * 4, 4);
    return static_cast<double>(value);
  }
  uint16_t half;
  std::memcpy(&half, static_cast<const char*>(base) + i * 2, 2);
  if (dtype == DType::kBFloat16) {
    const uint32_t bits = uint32_t{half} << 16;
    std::memcpy(&value, &bits, 4);
    return static_cast<double>(value);
  }
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  double number = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  if (exponent == 31) number = mantissa == 0 ? HUGE_VAL : NAN;
  return (half & 0x8000) != 0 ? -number : number;
}

// Tensors of numbers of a type chosen at run time.
class Numbers {
 public:
  Numbers(int64_t count, DType dtype, Memory memory = Memory::kHeap)
      : dtype_(dtype), count_(count), bytes_(count * dtype_bytes(dtype), memory) {}

  Numbers& fill(int64_t seed) {
    for (int64_t i = 0; i < count_; ++i) set(i, eighth(i + seed));
    return *this;
  }
  void set(int64_t i, float value) { write_number(bytes_.data(), i, dtype_, value); }
  double operator[](int64_t i) const { return read_number(bytes_.data(), i, dtype_); }
  bool is_finite() const {
    for (int64_t i = 0; i < count_; ++i) {
      if (!std::isfinite((*this)[i])) return false;
    }
    return true;
  }
  void* data() { return bytes_.data(); }
  int64_t size() const { return count_; }

 private:
  DType dtype_;
  int64_t count_;
  Buffer<uint8_t> bytes_;
};

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr KvDType kKvDTypes[] = {KvDType::kActivation, KvDType::kFp8E4M3, KvDType::kFp8E5M2};

// Of results of a few numbers of at most 1.
inline double tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 2e-5 : dtype == DType::kFloat16 ? 2e-3 : 1.6e-2;
}

void test_attention();
void test_attention_options();
void test_attention_refuses();
void test_rows();
void test_blocks();
void test_sampling();
void test_dequantize();
void test_linear();
void test_program();

}  // namespace pagemill::test
