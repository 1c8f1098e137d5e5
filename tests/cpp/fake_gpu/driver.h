// The fake driver as one that the process has: it is found under the library's name and lives as long as the process.
#pragma once

#include "device/cuda_abi.h"

namespace torch_offload::test {

/// The stream that takes the kernels.
CuStream compute_stream();

}  // namespace torch_offload::test
