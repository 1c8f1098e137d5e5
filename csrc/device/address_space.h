// Virtual addresses that never change, and the memory that comes and goes under them. The only file that maps,
// moves and protects memory and that handles SIGSEGV. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/units.h"
#include "device/memory.h"

namespace torch_offload {

/// The process's reserved arena of addresses. Physical memory is ordinary private anonymous memory that moves between
/// addresses with mremap (MREMAP_DONTUNMAP): its page tables move, no byte is copied, a huge page moves whole, and it
/// is resident at exactly one address at a time (docs/adr/0001).
///
/// There is one per process because the SIGSEGV disposition is one per process.
/// Threads: any. No call takes the GIL or waits for I/O. Only poison() is for signal handlers.
class AddressSpace final : public Memory {
public:
    /// Made on first use: reserves the arena, installs the handler.
    /// Throws: OutOfTierMemory if no arena can be reserved; InvalidArgument on a kernel without MREMAP_DONTUNMAP
    /// (< 5.7).
    static AddressSpace& process();

    std::size_t granularity_bytes() const noexcept override { return kSectorBytes; }

    /// Reserves addresses for `size_bytes` (rounded up to sectors; aligned to kHugePageBytes from that size on).
    /// Nothing is readable there (PROT_NONE) and no memory is used. Faults inside go to `target`; nullptr: to the
    /// previous SIGSEGV handler.
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) override;

    /// Changes who answers faults in a reserved range, or in whole sectors of it.
    void set_target(std::span<std::byte> range, FaultTarget* target) override;

    /// Gives the memory under `range` back and keeps its addresses for later reservations of that size.
    void release(std::span<std::byte> range) noexcept override;

    /// Makes [range) readable and writable zeros; memory is used as it is touched. Huge pages, where
    /// they are allowed and fit.
    void commit(std::span<std::byte> range, HugePages huge_pages = HugePages::allowed) override;

    /// Puts memory of a shared file under [range), at one instant: what lay there is gone. The same memory may be under
    /// several ranges, of which each is dropped by itself.
    void map_file(std::span<std::byte> range, int file, std::uint64_t offset, Protection protection);

    void populate(std::span<std::byte> range) noexcept override;

    /// Drops the memory: the range is PROT_NONE again and costs nothing.
    void decommit(std::span<std::byte> range) override;

    /// Moves the memory under `from` to the equally long `to`, which must hold none. `from` is left PROT_NONE and
    /// empty; `to` gets `protection`. At no instant is a byte readable at both, or a stale zero at either.
    /// Both lie in this arena. `from` may have any protection. After an error its bytes are where they were, and it may
    /// be PROT_NONE: protect() opens it again, at the limit of mappings too unless another thread takes the last ones.
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override;
    /// Pre: the memory is readable and writable. What stays behind are zeros, until `from` is released. What came in
    /// many small pieces is given back to the system, and new memory arrives as one.
    void move_unused(std::span<std::byte> from, std::byte* to) override;

    void protect(std::span<std::byte> range, Protection protection) override;

    /// Keeps a forked child from seeing `range` (set before memory that may be paged lies there), or lets it again.
    void hide_from_fork(std::span<std::byte> range, bool hidden) override;

    /// Replaces the missing memory of `range` by 0xFF bytes so that an access which cannot be served can end.
    /// Async-signal-safe. Only for fault targets and the thread that serves them.
    void poison(std::span<std::byte> range) noexcept override;

    void fill_zero(std::span<std::byte> range) override;

    bool contains(const void* address) const noexcept;

    /// Re-installs the SIGSEGV handler, chaining to whatever displaced it (faulthandler.enable(), say).
    /// Returns true if it had been displaced.
    bool ensure_handler_installed();

    /// Faults answered by targets since the start.
    std::uint64_t fault_count() const noexcept;

private:
    AddressSpace();
    ~AddressSpace() override;
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace torch_offload
