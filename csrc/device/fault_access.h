// What a SIGSEGV's machine context says about the access. Async-signal-safe. Layer device: includes nothing of this
// project.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>

#if defined(__aarch64__)
#include <asm/sigcontext.h>
#endif

namespace torch_offload {

/// True if the faulting access was a write, or may have been: a page wrongly taken for dirty costs a write to the
/// SSD, one wrongly taken for clean costs the data.
inline bool access_was_write(const ucontext_t& context) noexcept {
#if defined(__x86_64__)
    constexpr greg_t kWriteBit = 1 << 1;  // of the page-fault error code
    return (context.uc_mcontext.gregs[REG_ERR] & kWriteBit) != 0;
#elif defined(__aarch64__)
    // The exception syndrome is one of the tagged records that follow the registers.
    constexpr std::uint64_t kWriteNotRead = 1 << 6;
    constexpr std::uint64_t kCacheMaintenance = 1 << 8;  // reported as a write, is none
    const auto* bytes = reinterpret_cast<const std::byte*>(context.uc_mcontext.__reserved);
    const auto* record = reinterpret_cast<const _aarch64_ctx*>(bytes);
    while (record->magic != 0 && record->magic != ESR_MAGIC) {
        bytes += record->size;
        record = reinterpret_cast<const _aarch64_ctx*>(bytes);
    }
    if (record->magic != ESR_MAGIC) return true;
    const std::uint64_t syndrome = reinterpret_cast<const esr_context*>(record)->esr;
    return (syndrome & kWriteNotRead) != 0 && (syndrome & kCacheMaintenance) == 0;
#else
#error "torch_offload knows the write bit of a page fault on x86-64 and aarch64"
#endif
}

inline std::uintptr_t faulting_instruction(const ucontext_t& context) noexcept {
#if defined(__x86_64__)
    return static_cast<std::uintptr_t>(context.uc_mcontext.gregs[REG_RIP]);
#else
    return context.uc_mcontext.pc;
#endif
}

}  // namespace torch_offload
