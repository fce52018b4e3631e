#include "attention_wgmma_map.h"

#include <cuda_runtime.h>

#include "error.h"

namespace pagemill::cuda::wgmma {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime has loaded; the library does not link it.
EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  const bool is_found = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

struct Layout {
  const void* base;
  cuuint64_t sizes[4];
  cuuint64_t stride_bytes[3];  // of the dimensions after the first
  cuuint32_t box[4];
};

int encode(const char* name, const Layout& layout, DType dtype, int32_t chunk_bytes, CUtensorMap& map) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  if (encode_tiled == nullptr) return fail("attention: the driver has no cuTensorMapEncodeTiled");
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = chunk_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : chunk_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUtensorMapDataType type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = encode_tiled(&map, type, 4, const_cast<void*>(layout.base), layout.sizes, layout.stride_bytes,
                                       layout.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return 0;
  return fail("attention: no tensor map of %s can be made (driver error %d)", name, static_cast<int>(result));
}

}  // namespace

int make_tensor_maps(const PagedAttentionParams& p, const TileShape& shape, TensorMaps& maps) {
  const auto chunk = static_cast<cuuint64_t>(shape.chunk);
  const cuuint64_t num_chunks = p.head_size / shape.chunk, bytes = dtype_bytes(p.dtype);
  const cuuint64_t chunk_bytes = chunk * bytes, row_bytes = p.head_size * bytes;
  // Column in chunk, token, chunk, head.
  const Layout query{
      p.query,
      {chunk, static_cast<cuuint64_t>(p.num_tokens), num_chunks, static_cast<cuuint64_t>(p.num_query_heads)},
      {p.query_token_stride * bytes, chunk_bytes, p.query_head_stride * bytes},
      {static_cast<cuuint32_t>(shape.chunk), static_cast<cuuint32_t>(shape.query_rows),
       static_cast<cuuint32_t>(num_chunks), 1}};
  // Column in chunk, row in row group, chunk, row group.
  const cuuint64_t num_groups = static_cast<cuuint64_t>(p.num_blocks) * p.num_kv_heads * (p.block_size / 8);
  Layout cache{p.key_cache,
               {chunk, 8, num_chunks, num_groups},
               {row_bytes, chunk_bytes, 8 * row_bytes},
               {static_cast<cuuint32_t>(shape.chunk), 8, static_cast<cuuint32_t>(num_chunks),
                static_cast<cuuint32_t>(shape.box_rows / 8)}};
  const auto width = static_cast<int32_t>(chunk_bytes);
  if (const int error = encode("query", query, p.dtype, width, maps.query)) return error;
  if (const int error = encode("key_cache", cache, p.dtype, width, maps.key)) return error;
  cache.base = p.value_cache;
  return encode("value_cache", cache, p.dtype, width, maps.value);
}

}  // namespace pagemill::cuda::wgmma
