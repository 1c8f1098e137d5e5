#include "optim/adamw_kernels.h"

#include <cmath>

namespace torch_offload {

AdamWFactors adamw_factors(const AdamWOptions& options, double step) noexcept {
    const double average_correction = 1 - std::pow(options.beta1, step);
    const double square_correction = 1 - std::pow(options.beta2, step);
    return {static_cast<float>(1 - options.lr * options.weight_decay),
            static_cast<float>(1 - options.beta1),
            static_cast<float>(options.beta2),
            static_cast<float>(1 - options.beta2),
            static_cast<float>(std::sqrt(square_correction)),
            static_cast<float>(options.eps),
            static_cast<float>(-options.lr / average_correction),
            options.maximize};
}

void adamw_update(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling,
                  InstructionSet set) noexcept {
    switch (set) {
        case InstructionSet::portable:
            adamw_portable(arrays, factors, scaling);
            return;
        case InstructionSet::avx2:
            adamw_avx2(arrays, factors, scaling);
            return;
        case InstructionSet::avx512:
            adamw_avx512(arrays, factors, scaling);
            return;
    }
}

}  // namespace torch_offload
