#include "linear_fma.h"

namespace pagemill {

const LinearKernels& linear_kernels_avx2(DType dtype) { return fma_kernels(dtype); }

}  // namespace pagemill
