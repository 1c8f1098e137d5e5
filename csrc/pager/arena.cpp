#include "pager/arena.h"

#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload {

Arena::Arena(std::size_t limit_bytes, std::size_t reserve_bytes, HugePages huge_pages) : huge_pages_(huge_pages) {
    usage_.limit_bytes = limit_bytes;
    usage_.reserve_bytes = reserve_bytes;
}

Arena::~Arena() {
    AddressSpace& space = AddressSpace::process();
    for (const auto& [size, frame] : free_frames_) space.release(frame.slot);
    for (const auto& [size, range] : idle_ranges_) space.release(range);
}

void Arena::charge(std::size_t& account, std::size_t size_bytes) noexcept {
    account += size_bytes;
    usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.used_bytes());
    other_peak_bytes_ = std::max(other_peak_bytes_, usage_.range_bytes + usage_.small_bytes);
}

/// Gives free memory back to the system, largest first, until `size_bytes` more fit the limit.
bool Arena::make_room(std::size_t size_bytes, std::size_t reserve_bytes) {
    const auto fits = [&] { return usage_.used_bytes() + reserve_bytes + size_bytes <= usage_.limit_bytes; };
    while (!fits() && !idle_ranges_.empty()) {
        const auto largest = std::prev(idle_ranges_.end());
        AddressSpace::process().release(largest->second);
        usage_.idle_range_bytes -= largest->first;
        idle_ranges_.erase(largest);
    }
    for (auto frame = free_frames_.end(); !fits() && frame != free_frames_.begin();) {
        --frame;
        if (frame->second.fixed_index != kUnregistered) continue;
        AddressSpace::process().release(frame->second.slot);
        usage_.free_frame_bytes -= frame->first;
        frame = free_frames_.erase(frame);
    }
    return fits();
}

std::optional<Frame> Arena::try_take_frame(std::size_t size_bytes) {
    if (const auto reuse = free_frames_.find(size_bytes); reuse != free_frames_.end()) {
        const Frame frame = reuse->second;
        free_frames_.erase(reuse);
        usage_.free_frame_bytes -= size_bytes;
        charge(usage_.frame_bytes, size_bytes);
        return frame;
    }
    if (usage_.available_bytes() < size_bytes || !make_room(size_bytes, usage_.reserve_bytes)) return std::nullopt;
    AddressSpace& space = AddressSpace::process();
    const Frame frame{space.reserve(size_bytes, nullptr)};
    space.commit(frame.slot, huge_pages_);
    space.hide_from_fork(frame.slot, true);
    charge(usage_.frame_bytes, size_bytes);
    return frame;
}

void Arena::give_frame(const Frame& frame) {
    usage_.frame_bytes -= frame.slot.size();
    usage_.free_frame_bytes += frame.slot.size();
    free_frames_.emplace(frame.slot.size(), frame);
}

std::optional<std::span<std::byte>> Arena::try_take_range(std::size_t size_bytes) {
    if (const auto reuse = idle_ranges_.find(size_bytes); reuse != idle_ranges_.end()) {
        const std::span<std::byte> range = reuse->second;
        idle_ranges_.erase(reuse);
        usage_.idle_range_bytes -= size_bytes;
        charge(usage_.range_bytes, size_bytes);
        return range;
    }
    if (usage_.available_bytes() < size_bytes || !make_room(size_bytes, usage_.reserve_bytes)) return std::nullopt;
    AddressSpace& space = AddressSpace::process();
    const std::span<std::byte> range = space.reserve(size_bytes, nullptr);
    space.commit(range, huge_pages_);
    charge(usage_.range_bytes, size_bytes);
    return range;
}

void Arena::give_range(std::span<std::byte> range) {
    usage_.range_bytes -= range.size();
    usage_.idle_range_bytes += range.size();
    idle_ranges_.emplace(range.size(), range);
}

Frame Arena::adopt_into_frame(std::size_t size_bytes) {
    const Frame frame{AddressSpace::process().reserve(size_bytes, nullptr)};
    usage_.range_bytes -= size_bytes;
    charge(usage_.frame_bytes, size_bytes);
    return frame;
}

void Arena::return_to_range(const Frame& frame) {
    usage_.frame_bytes -= frame.slot.size();
    usage_.range_bytes += frame.slot.size();
    AddressSpace::process().release(frame.slot);
}

void Arena::release_frame(const Frame& frame) {
    usage_.frame_bytes -= frame.slot.size();
    AddressSpace::process().release(frame.slot);
}

bool Arena::try_count_small(std::size_t size_bytes) {
    if (!make_room(size_bytes, 0)) return false;
    charge(usage_.small_bytes, size_bytes);
    return true;
}

void Arena::count_small(std::ptrdiff_t delta_bytes) noexcept {
    charge(usage_.small_bytes, static_cast<std::size_t>(delta_bytes));
}

std::vector<Frame> Arena::take_registered_free_frames(std::size_t at_least_bytes) {
    std::vector<Frame> taken;
    std::size_t taken_bytes = 0;
    for (auto frame = free_frames_.begin(); frame != free_frames_.end() && taken_bytes < at_least_bytes;) {
        if (frame->second.fixed_index == kUnregistered) {
            ++frame;
            continue;
        }
        taken.push_back(frame->second);
        taken_bytes += frame->first;
        usage_.free_frame_bytes -= frame->first;
        usage_.frame_bytes += frame->first;
        frame = free_frames_.erase(frame);
    }
    return taken;
}

}  // namespace torch_offload
