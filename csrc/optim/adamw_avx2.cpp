// The AdamW kernel for processors with AVX2. Only what stands below the pragma may use its instructions.
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "optim/adamw_kernels.h"
#include "optim/packed_moments.h"
#include "optim/split_master.h"

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#include "optim/adamw_loops.h"

namespace torch_offload {

void adamw_avx2(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling) noexcept {
    update_all(arrays, factors, scaling);
}

}  // namespace torch_offload

#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif
