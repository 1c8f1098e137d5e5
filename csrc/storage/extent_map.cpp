#include "storage/extent_map.h"

#include <iterator>
#include <limits>
#include <utility>

#include "base/check.h"

namespace torch_offload {

void ExtentMap::release(std::uint64_t offset_bytes, std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0 && offset_bytes <= std::numeric_limits<std::uint64_t>::max() - size_bytes, LogicError,
                  "cannot free ", size_bytes, " bytes at offset ", offset_bytes);
    const std::uint64_t end_bytes = offset_bytes + size_bytes;
    const Hole after = holes_.lower_bound(offset_bytes);
    const Hole before = after == holes_.begin() ? holes_.end() : std::prev(after);
    const std::uint64_t before_end_bytes = before == holes_.end() ? 0 : before->first + before->second;
    OFFLOAD_CHECK((after == holes_.end() || end_bytes <= after->first) && before_end_bytes <= offset_bytes, LogicError,
                  "bytes [", offset_bytes, ", ", end_bytes, ") are freed twice");

    const bool joins_after = after != holes_.end() && after->first == end_bytes;
    const bool joins_before = before != holes_.end() && before_end_bytes == offset_bytes;
    if (joins_before) {
        const std::size_t joined_bytes = before->second + size_bytes + (joins_after ? after->second : 0);
        if (joins_after) drop(after);
        change(before, before->first, joined_bytes);
    } else if (joins_after) {
        change(after, offset_bytes, after->second + size_bytes);
    } else {
        const auto by_size = by_size_.emplace(size_bytes, offset_bytes).first;
        try {
            holes_.emplace(offset_bytes, size_bytes);
        } catch (...) {
            by_size_.erase(by_size);
            throw;
        }
    }
    free_bytes_ += size_bytes;
}

std::optional<std::uint64_t> ExtentMap::take(std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0, LogicError, "an extent has at least one byte");
    const auto fit = by_size_.lower_bound({size_bytes, 0});
    if (fit == by_size_.end()) return std::nullopt;
    const auto [hole_size, hole_offset] = *fit;
    const Hole hole = holes_.find(hole_offset);
    if (hole_size > size_bytes) {
        change(hole, hole_offset + size_bytes, hole_size - size_bytes);
    } else {
        drop(hole);
    }
    free_bytes_ -= size_bytes;
    return hole_offset;
}

/// Its nodes stay: nothing is allocated.
void ExtentMap::change(Hole hole, std::uint64_t offset_bytes, std::size_t size_bytes) noexcept {
    auto by_size = by_size_.extract({hole->second, hole->first});
    auto by_offset = holes_.extract(hole);
    by_offset.key() = offset_bytes;
    by_offset.mapped() = size_bytes;
    by_size.value() = {size_bytes, offset_bytes};
    holes_.insert(std::move(by_offset));
    by_size_.insert(std::move(by_size));
}

void ExtentMap::drop(Hole hole) noexcept {
    by_size_.erase({hole->second, hole->first});
    holes_.erase(hole);
}

}  // namespace torch_offload
