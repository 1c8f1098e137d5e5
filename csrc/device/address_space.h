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

namespace torch_offload {

/// Answers accesses to addresses whose memory is not there.
class FaultTarget {
public:
    virtual ~FaultTarget() = default;

    /// Called from the SIGSEGV handler on the faulting thread for an address inside a range of this target.
    /// Must be async-signal-safe: atomics and futex waits only. Returns once the access can be repeated.
    virtual void resolve_fault(std::byte* address, bool is_write) noexcept = 0;
};

enum class Protection : std::uint8_t { none, read, read_write };

/// Whether the system may back memory by huge pages. Not for memory of which parts are moved or given back alone.
enum class HugePages : std::uint8_t { never, allowed };

/// The process's reserved arena of addresses. Physical memory is ordinary private anonymous memory that moves between
/// addresses with mremap (MREMAP_DONTUNMAP): its page tables move, no byte is copied, a huge page moves whole, and it
/// is resident at exactly one address at a time (docs/adr/0001).
///
/// There is one per process because the SIGSEGV disposition is one per process.
/// Threads: any. No call takes the GIL or waits for I/O.
class AddressSpace {
public:
    /// Made on first use: reserves the arena, installs the handler.
    /// Throws: OutOfTierMemory if no arena can be reserved; InvalidArgument on a kernel without MREMAP_DONTUNMAP
    /// (< 5.7).
    static AddressSpace& process();

    /// Reserves addresses for `size_bytes` (rounded up to sectors; aligned to kHugePageBytes from that size on).
    /// Nothing is readable there (PROT_NONE) and no memory is used. Faults inside go to `target`; nullptr: to the
    /// previous SIGSEGV handler.
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target);

    /// Changes who answers faults in a reserved range.
    void set_target(std::span<std::byte> range, FaultTarget* target);

    /// Gives the memory under `range` back and keeps its addresses for later reservations of that size.
    void release(std::span<std::byte> range) noexcept;

    /// Makes [range) readable and writable zeros; memory is used as it is touched. Huge pages, where
    /// they are allowed and fit.
    void commit(std::span<std::byte> range, HugePages huge_pages = HugePages::allowed);

    /// Drops the memory: the range is PROT_NONE again and costs nothing.
    void decommit(std::span<std::byte> range);

    /// Moves the memory under `from` to the equally long `to`, which must hold none. `from` is left PROT_NONE and
    /// empty; `to` gets `protection`. At no instant is a byte readable at both, or a stale zero at either.
    /// Both lie in this arena. `from` may have any protection.
    void move(std::span<std::byte> from, std::byte* to, Protection protection);

    void protect(std::span<std::byte> range, Protection protection);

    /// Keeps a forked child from seeing `range` (set before memory that may be paged lies there), or lets it again.
    void hide_from_fork(std::span<std::byte> range, bool hidden);

    /// Replaces the missing memory of `range` by 0xFF bytes so that an access which cannot be served can end.
    /// Async-signal-safe. Only for fault targets and the thread that serves them.
    void poison(std::span<std::byte> range) noexcept;

    bool contains(const void* address) const noexcept;

    /// Re-installs the SIGSEGV handler, chaining to whatever displaced it (faulthandler.enable(), say).
    /// Returns true if it had been displaced.
    bool ensure_handler_installed();

    /// Faults answered by targets since the start.
    std::uint64_t fault_count() const noexcept;

    AddressSpace(const AddressSpace&) = delete;
    AddressSpace& operator=(const AddressSpace&) = delete;

private:
    AddressSpace();
    ~AddressSpace();
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace torch_offload
