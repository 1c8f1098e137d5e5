// Addresses that never change, and the memory that comes and goes under them: what a pager needs of its tier's memory.
// Layer device: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

/// The memory of one tier. Ranges are whole granules; whole granules of what was committed may move alone.
/// Threads: any; of one range one at a time. No call takes the GIL or waits for I/O.
class Memory {
public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    virtual ~Memory() = default;

    /// Addresses and sizes are multiples of it.
    virtual std::size_t granularity_bytes() const noexcept = 0;

    /// Reserves addresses for `size_bytes`, rounded up to granules, with no memory under them. Accesses go to `target`
    /// (nullptr: to nobody) where the memory can tell.
    /// Throws: OutOfTierMemory if there are no addresses left.
    virtual std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) = 0;

    /// Changes who answers accesses to a reserved range, or to part of one where granules of it may move alone.
    virtual void set_target(std::span<std::byte> range, FaultTarget* target) = 0;

    /// Gives up a reserved range and the memory under it.
    virtual void release(std::span<std::byte> range) noexcept = 0;

    /// Puts memory under [range), readable and writable, contents unspecified.
    /// Throws: OutOfTierMemory if the system has none.
    virtual void commit(std::span<std::byte> range, HugePages huge_pages) = 0;

    /// Has the system clear what was committed, and nobody uses yet, now and not at its first use. A memory that has
    /// done so, or cannot, does nothing.
    virtual void populate(std::span<std::byte>) noexcept {}

    /// Drops the memory; the addresses stay reserved.
    virtual void decommit(std::span<std::byte> range) = 0;

    /// Moves the memory under `from`, which may have come there in parts, to the equally long `to`, which must hold
    /// none, without copying it. If it throws, the memory is under `from`, and has to be protected again before it is
    /// used.
    virtual void move(std::span<std::byte> from, std::byte* to, Protection protection) = 0;
    /// The same, readable and writable, for memory that nobody uses and addresses that nobody knows: an access to
    /// either before this returns is not told. What it holds may be lost, and all of it if this throws.
    virtual void move_unused(std::span<std::byte> from, std::byte* to) { move(from, to, Protection::read_write); }
    /// Whether what was committed can be used where it was committed, too, while it has moved elsewhere. Only the whole
    /// of it moves then, away from there and back.
    virtual bool keeps_place() const noexcept { return false; }

    virtual void protect(std::span<std::byte> range, Protection protection) = 0;

    /// Keeps a forked child from seeing the memory under `range`, or lets it again.
    virtual void hide_from_fork(std::span<std::byte> range, bool hidden) = 0;

    /// Makes an access that cannot be served end on 0xFF bytes.
    virtual void poison(std::span<std::byte> range) noexcept = 0;

    /// Zeros there once it returns.
    virtual void fill_zero(std::span<std::byte> range) = 0;
};

}  // namespace torch_offload
