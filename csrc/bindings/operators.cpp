// The operators of this package, torch.ops.torch_offload.
#include <torch/library.h>

#include "optim/adamw_operator.h"

namespace torch_offload {
namespace {

TORCH_LIBRARY(torch_offload, m) {
    m.def(kFusedAdamWSchema);
    m.impl("fused_adamw_", c10::DispatchKey::CPU, TORCH_FN(fused_adamw));
}

}  // namespace
}  // namespace torch_offload
