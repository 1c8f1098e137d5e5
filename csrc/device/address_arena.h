// Which addresses of the arena are taken, and who answers for them: pure bookkeeping, no system call.
// Layer device: includes base only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/units.h"

namespace torch_offload {

class FaultTarget;

/// Unit of reserved addresses and of the fault table. Memory comes in sectors; only addresses are this coarse.
inline constexpr std::size_t kAddressGranuleBytes = 64 * kKiB;

/// Deals out offsets of an arena in size classes, eight to each power of two, so that a program with many distinct
/// sizes reuses addresses instead of exhausting them: at most an eighth of a block is unused.
/// Blocks from kHugePageBytes on grow up from the arena's start and are aligned to kHugePageBytes; smaller ones grow
/// down from its end. Blocks are never joined or split.
/// Threads: none of its own; the owner holds a lock.
class AddressArena {
public:
    /// Pre: `capacity_bytes` is a multiple of kHugePageBytes.
    explicit AddressArena(std::size_t capacity_bytes) noexcept
        : capacity_bytes_(capacity_bytes), top_bytes_(capacity_bytes) {}

    /// The offset of a free block for `size_bytes`, or nothing when the arena is used up.
    std::optional<std::size_t> take(std::size_t size_bytes);

    /// Makes a taken block free again. Returns false, and changes nothing, unless exactly that block is taken.
    bool give_back(std::size_t offset_bytes, std::size_t size_bytes) noexcept;

    /// True if exactly [offset, offset + size) was taken and not given back.
    bool is_taken(std::size_t offset_bytes, std::size_t size_bytes) const;

    /// True if [offset, offset + size) lies in one block that was taken and not given back.
    bool is_part_of_taken(std::size_t offset_bytes, std::size_t size_bytes) const;

    std::size_t capacity_bytes() const noexcept { return capacity_bytes_; }
    std::size_t taken_count() const noexcept { return taken_.size(); }

    /// Addresses a block for `size_bytes` occupies.
    static std::size_t block_bytes(std::size_t size_bytes) noexcept;

private:
    /// Blocks of one size. There is room in `free` for all that were ever made, so that giving back allocates nothing.
    struct Blocks {
        std::vector<std::size_t> free;  // offsets
        std::size_t made = 0;
    };

    std::optional<std::size_t> grow(std::size_t block_bytes) noexcept;

    std::size_t capacity_bytes_;
    std::size_t bottom_bytes_ = 0;                    // large blocks lie below
    std::size_t top_bytes_;                           // small blocks lie above
    std::unordered_map<std::size_t, Blocks> blocks_;  // by their size
    std::map<std::size_t, std::size_t> taken_;        // offset -> size bytes
};

/// Finds the target of a faulting address. A view of sparse zeroed memory that the owner maps.
/// One pointer a granule, and how many sectors of the granule belong to the range: a range ends at a sector. Where
/// ranges begin or end within a granule that they share, a pointer a sector.
/// Threads: lookups from any thread and signal handler; changes by one thread at a time.
class FaultTable {
public:
    /// Bytes of table for an arena. Only the parts that describe reserved addresses are ever touched.
    static std::size_t bytes_for(std::size_t arena_bytes) noexcept {
        return arena_bytes / kAddressGranuleBytes * (sizeof(FaultTarget*) + sizeof(std::uint8_t));
    }

    /// Pre: `zeros` are bytes_for(arena_bytes) zero bytes, aligned to a page, that outlive the table.
    FaultTable(std::byte* zeros, std::size_t arena_bytes) noexcept
        : targets_(reinterpret_cast<FaultTarget**>(zeros)),
          sectors_(reinterpret_cast<std::uint8_t*>(zeros + arena_bytes / kAddressGranuleBytes * sizeof(FaultTarget*))) {
    }

    /// Faults in [offset, offset + size) go to `target`; nullptr: to nobody, which never throws.
    /// Throws: std::bad_alloc, with nothing changed.
    void set(std::size_t offset_bytes, std::size_t size_bytes, FaultTarget* target);

    /// Async-signal-safe.
    FaultTarget* find(std::size_t offset_bytes) const noexcept;

private:
    static constexpr std::size_t kSectorsPerGranule = kAddressGranuleBytes / kSectorBytes;
    using SharedGranule = std::array<FaultTarget*, kSectorsPerGranule>;

    static SharedGranule* shared_granule(FaultTarget* entry) noexcept;
    void share(std::size_t granule);

    FaultTarget** targets_;  // or, with the lowest bit set, SharedGranule*
    std::uint8_t* sectors_;
    std::vector<std::unique_ptr<SharedGranule>> shared_;  // kept: a signal handler may read one
};

}  // namespace torch_offload
