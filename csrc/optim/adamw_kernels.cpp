#include "optim/adamw_kernels.h"

#include <cmath>

namespace torch_offload {
namespace {

InstructionSet find_best() noexcept {
    if (is_available(InstructionSet::avx512)) return InstructionSet::avx512;
    return is_available(InstructionSet::avx2) ? InstructionSet::avx2 : InstructionSet::portable;
}

}  // namespace

bool is_available(InstructionSet set) noexcept {
#if defined(__x86_64__)
    // The compiler's own test also asks whether the system saves the registers.
    __builtin_cpu_init();
    if (set == InstructionSet::avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    if (set == InstructionSet::avx2) return __builtin_cpu_supports("avx2");
#endif
    return set == InstructionSet::portable;
}

InstructionSet best_instruction_set() noexcept {
    static const InstructionSet best = find_best();
    return best;
}

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
