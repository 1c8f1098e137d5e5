// The CPU allocator while an engine is installed: large allocations count against its budget. Layer autograd.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/units.h"

namespace torch_offload {

class Engine;

/// Allocations from this size on get a range of their own.
inline constexpr std::size_t kLargeAllocationBytes = 64 * kKiB;

/// Says that heap memory was freed. It lies in holes of the C library's heap, beside the budget, until it is given back
/// to the system: in steps of some MiB, since each walks the heap. Threads: any.
void note_heap_freed(std::size_t size_bytes);

/// Wraps the CPU allocator that was there before. There is one per process; once installed it stays torch's allocator
/// for good, without an engine it only hands on: storages keep a pointer to the allocator that made them, and what
/// kernel libraries allocated raw they free through whichever allocator is torch's then.
/// Threads: allocate from any, with or without the GIL; install and remove from one at a time.
class RegisterAllocator final : public c10::Allocator {
public:
    static RegisterAllocator& process();

    /// From now on large allocations are temporaries of `engine`, which stays alive until removed.
    void install(std::shared_ptr<Engine> engine);
    /// From now on allocations are ordinary, if `engine` is the one installed. Memory handed out stays valid.
    void remove(const Engine& engine);
    /// The same whatever engine is installed.
    void remove_any();

    /// Throws: OutOfTierMemory, TierIoError, as Python exceptions where Python is there.
    c10::DataPtr allocate(std::size_t size_bytes) override;
    /// All of them are freed by one function, so raw allocation works; not over an allocator of unknown kind.
    c10::DeleterFnPtr raw_deleter() const override { return previous_deleter_ ? &free_memory : nullptr; }
    void copy_data(void* target, const void* source, std::size_t size_bytes) const override;

private:
    RegisterAllocator();
    c10::DataPtr allocate_large(std::shared_ptr<Engine> engine, std::size_t size_bytes);
    static void free_memory(void* address);
    void note_allocated(std::size_t size_bytes);
    void note_freed(std::size_t size_bytes);
    enum class GrantChange : std::uint8_t { shrink, any };
    void settle_grant(GrantChange allowed);

    c10::Allocator* previous_;
    c10::DeleterFnPtr previous_deleter_;  // nullptr: small allocations of an unknown allocator are not counted
    std::atomic<std::shared_ptr<Engine>> engine_;
    std::atomic<std::ptrdiff_t> small_bytes_{0};    // small allocations less frees since the last installation
    std::atomic<std::ptrdiff_t> granted_bytes_{0};  // what the installed engine's budget holds for them
    std::atomic<std::ptrdiff_t> quantum_bytes_{0};  // granted ahead
    std::mutex grant_mutex_;                        // one thread changes the grant; the others do not wait for it
};

/// While one lives, large allocations of this thread go to the previous allocator, and small ones are never refused.
class AllocatorBypass {
public:
    AllocatorBypass() noexcept;
    ~AllocatorBypass();
    AllocatorBypass(const AllocatorBypass&) = delete;
    AllocatorBypass& operator=(const AllocatorBypass&) = delete;
};

}  // namespace torch_offload
