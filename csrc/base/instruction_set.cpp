#include "base/instruction_set.h"

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

}  // namespace torch_offload
