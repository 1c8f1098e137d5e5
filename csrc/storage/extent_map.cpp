#include "storage/extent_map.h"

#include <iterator>
#include <limits>
#include <utility>

#include "base/check.h"

namespace torch_offload {

void ExtentMap::add(std::uint64_t offset_bytes, std::size_t size_bytes) {
    make_spare();
    try {
        release(offset_bytes, size_bytes);
    } catch (...) {
        take_spare();
        throw;
    }
}

std::optional<std::uint64_t> ExtentMap::take(std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0, LogicError, "an extent has at least one byte");
    const auto fit = by_size_.lower_bound({size_bytes, 0});
    if (fit == by_size_.end()) return std::nullopt;
    const auto [hole_size, hole_offset] = *fit;
    const Holes::iterator hole = holes_.find(hole_offset);
    if (hole_size > size_bytes) {
        make_spare();
        put_in(take_out(hole), hole_offset + size_bytes, hole_size - size_bytes);
    } else {
        keep_spare(take_out(hole));
    }
    free_bytes_ -= size_bytes;
    return hole_offset;
}

void ExtentMap::release(std::uint64_t offset_bytes, std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0 && offset_bytes <= std::numeric_limits<std::uint64_t>::max() - size_bytes, LogicError,
                  "cannot free ", size_bytes, " bytes at offset ", offset_bytes);
    const std::uint64_t end_bytes = offset_bytes + size_bytes;
    const Holes::iterator after = holes_.lower_bound(offset_bytes);
    const Holes::iterator before = after == holes_.begin() ? holes_.end() : std::prev(after);
    const std::uint64_t before_end_bytes = before == holes_.end() ? 0 : before->first + before->second;
    OFFLOAD_CHECK((after == holes_.end() || end_bytes <= after->first) && before_end_bytes <= offset_bytes, LogicError,
                  "bytes [", offset_bytes, ", ", end_bytes, ") are freed twice");
    OFFLOAD_CHECK(!spare_holes_.empty(), LogicError, "bytes [", offset_bytes, ", ", end_bytes,
                  ") are freed, and none are taken");

    Node node = take_spare();
    std::uint64_t joined_begin = offset_bytes;
    std::size_t joined_bytes = size_bytes;
    if (after != holes_.end() && after->first == end_bytes) {
        joined_bytes += after->second;
        node = take_out(after);
    }
    if (before != holes_.end() && before_end_bytes == offset_bytes) {
        joined_begin = before->first;
        joined_bytes += before->second;
        node = take_out(before);
    }
    put_in(std::move(node), joined_begin, joined_bytes);
    free_bytes_ += size_bytes;
}

void ExtentMap::make_spare() {
    Holes hole{{0, 0}};
    HolesBySize by_size{{0, 0}};
    keep_spare({hole.extract(hole.begin()), by_size.extract(by_size.begin())});
}

void ExtentMap::keep_spare(Node node) noexcept {
    spare_holes_.insert(std::move(node.hole));
    spare_by_size_.insert(std::move(node.by_size));
}

ExtentMap::Node ExtentMap::take_spare() noexcept {
    return {spare_holes_.extract(spare_holes_.begin()), spare_by_size_.extract(spare_by_size_.begin())};
}

ExtentMap::Node ExtentMap::take_out(Holes::iterator hole) noexcept {
    const std::pair<std::size_t, std::uint64_t> key{hole->second, hole->first};
    return {holes_.extract(hole), by_size_.extract(key)};
}

void ExtentMap::put_in(Node node, std::uint64_t offset_bytes, std::size_t size_bytes) noexcept {
    node.hole.key() = offset_bytes;
    node.hole.mapped() = size_bytes;
    node.by_size.value() = {size_bytes, offset_bytes};
    holes_.insert(std::move(node.hole));
    by_size_.insert(std::move(node.by_size));
}

}  // namespace torch_offload
