#include "storage/extent_map.h"

#include <iterator>
#include <limits>

#include "base/check.h"

namespace torch_offload {

void ExtentMap::release(std::uint64_t offset_bytes, std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0 && offset_bytes <= std::numeric_limits<std::uint64_t>::max() - size_bytes, LogicError,
                  "cannot free ", size_bytes, " bytes at offset ", offset_bytes);
    const std::uint64_t end_bytes = offset_bytes + size_bytes;
    const auto after = holes_.lower_bound(offset_bytes);
    const auto before = after == holes_.begin() ? holes_.end() : std::prev(after);
    const std::uint64_t before_end_bytes = before == holes_.end() ? 0 : before->first + before->second;
    OFFLOAD_CHECK((after == holes_.end() || end_bytes <= after->first) && before_end_bytes <= offset_bytes, LogicError,
                  "bytes [", offset_bytes, ", ", end_bytes, ") are freed twice");

    std::uint64_t hole_offset = offset_bytes;
    std::size_t hole_size = size_bytes;
    if (after != holes_.end() && after->first == end_bytes) {
        hole_size += after->second;
        by_size_.erase({after->second, after->first});
        holes_.erase(after);
    }
    if (before != holes_.end() && before_end_bytes == offset_bytes) {
        hole_offset = before->first;
        hole_size += before->second;
        by_size_.erase({before->second, before->first});
        holes_.erase(before);
    }
    holes_.emplace(hole_offset, hole_size);
    by_size_.emplace(hole_size, hole_offset);
    free_bytes_ += size_bytes;
}

std::optional<std::uint64_t> ExtentMap::take(std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0, LogicError, "an extent has at least one byte");
    const auto fit = by_size_.lower_bound({size_bytes, 0});
    if (fit == by_size_.end()) return std::nullopt;
    const auto [hole_size, hole_offset] = *fit;
    by_size_.erase(fit);
    holes_.erase(hole_offset);
    if (hole_size > size_bytes) {
        holes_.emplace(hole_offset + size_bytes, hole_size - size_bytes);
        by_size_.emplace(hole_size - size_bytes, hole_offset + size_bytes);
    }
    free_bytes_ -= size_bytes;
    return hole_offset;
}

}  // namespace torch_offload
