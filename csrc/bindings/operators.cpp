// The operators of this package, torch.ops.torch_offload.
#include <torch/library.h>

#include "autograd/coded_linear.h"
#include "autograd/error_feedback_operator.h"
#include "optim/adamw_operator.h"
#include "optim/writeback_operator.h"

namespace torch_offload {
namespace {

TORCH_LIBRARY(torch_offload, m) {
    m.def(kFusedAdamWSchema);
    m.impl("fused_adamw_", c10::DispatchKey::CPU, TORCH_FN(fused_adamw));
    m.def(kPackMomentSchema);
    m.impl("pack_moment", c10::DispatchKey::CPU, TORCH_FN(packed_moment));
    m.def(kUnpackMomentSchema);
    m.impl("unpack_moment", c10::DispatchKey::CPU, TORCH_FN(unpacked_moment));
    m.def(kDepartGradientSchema);
    m.impl("write_back_gradient", c10::DispatchKey::CPU, TORCH_FN(write_back_gradient));
    m.def(kCodedLinearSchema);
    m.impl("coded_linear", c10::DispatchKey::CPU, TORCH_FN(coded_linear));
    m.def(kCodedLinearTransposedSchema);
    m.impl("coded_linear_transposed", c10::DispatchKey::CPU, TORCH_FN(coded_linear_transposed));
    m.def(kEncodeTernarySchema);
    m.impl("encode_ternary", c10::DispatchKey::CPU, TORCH_FN(encode_ternary));
    m.def(kDecodeTernarySchema);
    m.impl("decode_ternary", c10::DispatchKey::CPU, TORCH_FN(decode_ternary));
    m.def(kCodedExtentsSchema);
    m.impl("coded_extents", c10::DispatchKey::CPU, TORCH_FN(coded_extents));
    m.def(kCountZerosSchema);
    m.impl("count_zeros", c10::DispatchKey::CPU, TORCH_FN(count_zeros));
    m.def(kRoundWithFeedbackSchema);
    m.impl("round_with_feedback", c10::DispatchKey::CPU, TORCH_FN(round_with_feedback));
    m.def(kChooseAgainSchema);
    m.impl("refine", c10::DispatchKey::CPU, TORCH_FN(refine_values));
#ifdef TORCH_OFFLOAD_CUDA
    m.impl("fused_adamw_", c10::DispatchKey::CUDA, TORCH_FN(fused_adamw_cuda));
    m.impl("write_back_gradient", c10::DispatchKey::CUDA, TORCH_FN(write_back_gradient_cuda));
    m.impl("coded_linear", c10::DispatchKey::CUDA, TORCH_FN(coded_linear_cuda));
    m.impl("coded_linear_transposed", c10::DispatchKey::CUDA, TORCH_FN(coded_linear_transposed_cuda));
    m.impl("decode_ternary", c10::DispatchKey::CUDA, TORCH_FN(decode_ternary_cuda));
#endif
}

}  // namespace
}  // namespace torch_offload
