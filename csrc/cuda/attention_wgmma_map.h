// Tensor maps of the warp-group prefill kernel: how the copy engine sees queries and cache.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "pagemill/params.h"

namespace pagemill::cuda::wgmma {

struct TensorMaps {
  CUtensorMap query, key, value;
};

struct TileShape {
  int32_t query_rows;  // of a copy of queries
  int32_t box_rows;    // of a copy of keys or values, all in one page
  int32_t chunk;       // columns that are swizzled together
};

// 0, or what fail() gave.
int make_tensor_maps(const PagedAttentionParams& params, const TileShape& shape, TensorMaps& maps);

}  // namespace pagemill::cuda::wgmma
