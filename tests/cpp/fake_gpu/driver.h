// The fake driver as one that the process has: it is found under the library's name and lives as long as the process.
#pragma once

#include <cstddef>
#include <span>

#include "device/cuda_abi.h"

namespace torch_offload::test {

/// The stream that takes the kernels.
CuStream compute_stream();
/// Whether the driver has mapped physical memory at all of these addresses.
bool is_mapped(std::span<const std::byte> memory);

}  // namespace torch_offload::test
