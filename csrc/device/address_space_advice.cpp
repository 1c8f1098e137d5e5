#include "device/address_space_advice.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/units.h"

namespace torch_offload {
namespace {

/// Only an advice: a kernel that does not know it, or memory that it does not fit, changes nothing.
bool advise(std::uintptr_t begin, std::uintptr_t end, int advice) noexcept {
    return begin < end && ::madvise(reinterpret_cast<void*>(begin), end - begin, advice) == 0;
}

/// Of the sectors that lie in `range` as a whole.
bool advise_sectors(std::span<const std::byte> range, int advice) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(range.data());
    return advise(round_up(begin, kSectorBytes), (begin + range.size()) / kSectorBytes * kSectorBytes, advice);
}

}  // namespace

void advise_read_ahead(const std::byte* begin, std::size_t size_bytes) noexcept {
    const auto first = reinterpret_cast<std::uintptr_t>(begin);
    advise(first / kSectorBytes * kSectorBytes, first + size_bytes, MADV_WILLNEED);
}

void advise_few_touches(std::span<const std::byte> mapping) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(mapping.data());
    const std::uintptr_t end = begin + mapping.size();
    // Without the first the second would have each sector read alone.
    if (advise(begin, end, MADV_HUGEPAGE)) advise(begin, end, MADV_RANDOM);
}

void advise_single_touches(const std::byte* begin, std::size_t size_bytes) noexcept {
    const auto first = reinterpret_cast<std::uintptr_t>(begin);
    advise(first / kSectorBytes * kSectorBytes, first + size_bytes, MADV_RANDOM);
}

void advise_huge_pages(std::span<std::byte> memory) noexcept {
    if (advise_sectors(memory, MADV_HUGEPAGE)) advise_sectors(memory, MADV_DONTNEED);
}

void advise_not_needed(std::span<const std::byte> range) noexcept {
#ifdef MADV_PAGEOUT
    advise_sectors(range, MADV_PAGEOUT);
#else
    static_cast<void>(range);
#endif
}

}  // namespace torch_offload
