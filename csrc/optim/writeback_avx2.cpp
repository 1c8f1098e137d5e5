// The writeback of gradients for processors with AVX2. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "optim/adamw_kernels.h"
#include "optim/split_master.h"
#include "optim/thread_team.h"
#include "optim/writeback.h"

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "optim/writeback_loops.h"

namespace torch_offload {

void writeback_avx2(const WritebackArrays& arrays, WritebackSum* sums) noexcept { write_back_all(arrays, sums); }

}  // namespace torch_offload

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif
