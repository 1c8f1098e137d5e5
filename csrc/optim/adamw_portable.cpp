// The AdamW kernel for any processor.
#include "optim/adamw_loops.h"

namespace torch_offload {

void adamw_portable(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling) noexcept {
    update_all(arrays, factors, scaling);
}

}  // namespace torch_offload
