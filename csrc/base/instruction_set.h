// Which instructions kernels may use here, asked of the processor at run time. Layer base: includes nothing of this
// project.
#pragma once

#include <cstdint>

namespace torch_offload {

/// What a kernel may be compiled for. Each has the same results, bit for bit.
enum class InstructionSet : std::uint8_t { portable, avx2, avx512 };

/// True if this build has the kernel and this processor (and system) runs it.
bool is_available(InstructionSet set) noexcept;
/// The widest one available; asked of the processor once.
InstructionSet best_instruction_set() noexcept;

}  // namespace torch_offload
