#include "pager/arena.h"

#include <algorithm>
#include <new>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload {

Arena::Arena(const ArenaOptions& options)
    : piece_bytes_(options.piece_bytes),
      huge_pages_(options.huge_pages),
      memory_(options.memory ? *options.memory : AddressSpace::process()) {
    usage_.limit_bytes = options.limit_bytes;
    usage_.reserve_bytes = options.reserve_bytes;
}

Arena::~Arena() {
    for (const auto& [size, frame] : free_frames_) memory_.release(frame.slot);
    for (const auto& [size, frame] : registered_free_frames_) memory_.release(frame.slot);
    for (const auto& [size, range] : idle_ranges_) memory_.release(range);
}

void Arena::charge(std::size_t& account, std::size_t size_bytes) noexcept {
    account += size_bytes;
    usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.used_bytes());
    other_peak_bytes_ = std::max(other_peak_bytes_, usage_.range_bytes + usage_.small_bytes);
}

bool Arena::has_space(std::size_t size_bytes, std::size_t reserve_bytes) const noexcept {
    return usage_.used_bytes() + reserve_bytes + size_bytes <= usage_.limit_bytes;
}

/// Gives free memory back to the system, largest first, until `size_bytes` more fit the limit.
bool Arena::make_space(std::size_t size_bytes, std::size_t reserve_bytes) {
    const auto fits = [&] { return has_space(size_bytes, reserve_bytes); };
    while (!fits() && !idle_ranges_.empty()) {
        const auto largest = std::prev(idle_ranges_.end());
        release_range(largest->second);
        usage_.idle_range_bytes -= largest->first;
        idle_ranges_.erase(largest);
    }
    while (!fits() && !free_frames_.empty()) {
        const auto largest = std::prev(free_frames_.end());
        memory_.release(largest->second.slot);
        usage_.free_frame_bytes -= largest->first;
        free_frames_.erase(largest);
    }
    return fits();
}

/// Turns the largest idle range that can be into free frames; what is left of it goes back to the system. False if
/// there is none.
bool Arena::take_apart(std::size_t frame_bytes) {
    auto found = idle_ranges_.end();
    do {
        if (found == idle_ranges_.begin()) return false;
        --found;
        if (found->first < frame_bytes) return false;
    } while (!can_become_pages(found->second, frame_bytes));
    const std::span<std::byte> range = found->second;
    idle_ranges_.erase(found);
    usage_.idle_range_bytes -= range.size();
    try {
        for (std::size_t begin = 0; begin + frame_bytes <= range.size(); begin += frame_bytes) {
            keep_free_frame(move_into_frame(range.subspan(begin, frame_bytes)));
        }
    } catch (...) {  // no more mappings: the rest is given up
        release_range(range);
        throw;
    }
    release_range(range);
    return true;
}

Frame Arena::move_into_frame(std::span<std::byte> range) {
    const Frame frame{memory_.reserve(range.size(), nullptr)};
    try {
        memory_.move(range, frame.slot.data(), Protection::read_write);
        memory_.hide_from_fork(frame.slot, true);
    } catch (...) {
        memory_.release(frame.slot);
        throw;
    }
    return frame;
}

/// Uncounted: the caller says what it is now.
std::optional<Frame> Arena::take_free_frame(std::size_t size_bytes) {
    const auto found = free_frames_.find(size_bytes);
    if (found == free_frames_.end()) return std::nullopt;
    const Frame frame = found->second;
    free_frames_.erase(found);
    usage_.free_frame_bytes -= size_bytes;
    return frame;
}

/// The same.
std::optional<Frame> Arena::take_registered_frame(std::size_t size_bytes) {
    auto entry = registered_free_frames_.extract(size_bytes);
    if (!entry) return std::nullopt;
    usage_.free_frame_bytes -= size_bytes;
    return registered_in_use_.insert(std::move(entry))->second;
}

/// Registered frames first: the others are of use to ranges as well.
std::optional<Frame> Arena::try_take_frame(std::size_t size_bytes) {
    std::optional<Frame> free = take_registered_frame(size_bytes);
    if (!free) free = take_free_frame(size_bytes);
    if (!free && !has_space(size_bytes, usage_.reserve_bytes) && take_apart(size_bytes)) {
        free = take_free_frame(size_bytes);
    }
    if (free) {
        charge(usage_.frame_bytes, size_bytes);
        return free;
    }
    if (usage_.available_bytes() < size_bytes || !make_space(size_bytes, usage_.reserve_bytes)) return std::nullopt;
    const Frame frame = make_frame(size_bytes);
    charge(usage_.frame_bytes, size_bytes);
    return frame;
}

/// Of new memory.
Frame Arena::make_frame(std::size_t size_bytes) {
    const Frame frame{memory_.reserve(size_bytes, nullptr)};
    try {
        memory_.commit(frame.slot, huge_pages_);
        memory_.hide_from_fork(frame.slot, true);
    } catch (...) {  // the device's memory is somebody else's, say
        memory_.release(frame.slot);
        throw;
    }
    return frame;
}

void Arena::give_frame(const Frame& frame) noexcept {
    usage_.frame_bytes -= frame.slot.size();
    keep_free_frame(frame);
}

void Arena::keep_free_frame(const Frame& frame) noexcept {
    const std::size_t size_bytes = frame.slot.size();
    if (frame.fixed_index != kUnregistered) {
        auto entry = registered_in_use_.extract(registered_in_use_.find(size_bytes));
        entry.mapped() = frame;
        registered_free_frames_.insert(std::move(entry));
        usage_.free_frame_bytes += size_bytes;
        return;
    }
    try {
        free_frames_.emplace(size_bytes, frame);
        usage_.free_frame_bytes += size_bytes;
    } catch (const std::bad_alloc&) {
        memory_.release(frame.slot);
    }
}

bool Arena::expect_registered(std::size_t size_bytes) noexcept try {
    registered_in_use_.emplace(size_bytes, Frame{});
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

void Arena::forget_registered(std::size_t size_bytes) noexcept {
    registered_in_use_.erase(registered_in_use_.find(size_bytes));
}

void Arena::give_up_frame(const Frame& frame) noexcept {
    if (frame.fixed_index != kUnregistered) forget_registered(frame.slot.size());
    usage_.frame_bytes -= frame.slot.size();
    memory_.release(frame.slot);
}

std::optional<std::span<std::byte>> Arena::try_take_range(std::size_t size_bytes) {
    if (const auto reuse = idle_ranges_.find(size_bytes); reuse != idle_ranges_.end()) {
        const std::span<std::byte> range = reuse->second;
        idle_ranges_.erase(reuse);
        usage_.idle_range_bytes -= size_bytes;
        charge(usage_.range_bytes, size_bytes);
        return range;
    }
    if (usage_.available_bytes() < size_bytes) return std::nullopt;
    const std::size_t piece_count = piece_bytes_ == 0 ? 0 : size_bytes / piece_bytes_;
    while (free_frames_.count(piece_bytes_) < piece_count && !has_space(size_bytes, usage_.reserve_bytes)) {
        if (!take_apart(piece_bytes_)) break;
    }
    const std::vector<Frame> pieces = take_pieces(piece_count);
    if (!make_space(size_bytes, usage_.reserve_bytes)) {
        for (const Frame& piece : pieces) keep_free_frame(piece);
        return std::nullopt;
    }
    const std::span<std::byte> range = put_together(pieces, size_bytes);
    charge(usage_.range_bytes, size_bytes);
    return range;
}

std::vector<Frame> Arena::take_pieces(std::size_t at_most) {
    std::vector<Frame> pieces;
    pieces.reserve(std::min(at_most, free_frames_.count(piece_bytes_)));
    while (pieces.size() < at_most) {
        const std::optional<Frame> piece = take_free_frame(piece_bytes_);
        if (!piece) break;
        pieces.push_back(*piece);
    }
    return pieces;
}

/// A range that begins with the memory of `pieces`; the rest is new.
std::span<std::byte> Arena::put_together(const std::vector<Frame>& pieces, std::size_t size_bytes) {
    std::span<std::byte> range;
    try {
        range = memory_.reserve(size_bytes, nullptr);
        if (!pieces.empty()) mapping_bytes_[range.data()] = piece_bytes_;
        std::size_t count = 0;
        for (; count < pieces.size(); ++count) {
            memory_.move(pieces[count].slot, range.data() + count * piece_bytes_, Protection::read_write);
        }
        const std::size_t filled_bytes = count * piece_bytes_;
        if (filled_bytes > 0) memory_.hide_from_fork(range.first(filled_bytes), false);
        if (filled_bytes < range.size()) memory_.commit(range.subspan(filled_bytes), huge_pages_);
    } catch (...) {  // no more mappings: the memory is given up
        if (!range.empty()) release_range(range);
        for (const Frame& piece : pieces) memory_.release(piece.slot);
        throw;
    }
    for (const Frame& piece : pieces) memory_.release(piece.slot);
    return range;
}

bool Arena::can_become_pages(std::span<std::byte> range, std::size_t page_bytes) const {
    const auto found = mapping_bytes_.find(range.data());
    return found == mapping_bytes_.end() || found->second % page_bytes == 0;
}

void Arena::hand_over(std::span<std::byte> range) noexcept { mapping_bytes_.erase(range.data()); }

void Arena::take_back(std::span<std::byte> range, std::size_t page_bytes) noexcept try {
    if (page_bytes < range.size()) mapping_bytes_[range.data()] = page_bytes;
    give_range(range);
} catch (const std::bad_alloc&) {
    usage_.range_bytes -= range.size();
    release_range(range);
}

void Arena::give_range(std::span<std::byte> range) noexcept {
    usage_.range_bytes -= range.size();
    try {
        idle_ranges_.emplace(range.size(), range);
        usage_.idle_range_bytes += range.size();
    } catch (const std::bad_alloc&) {
        release_range(range);
    }
}

void Arena::release_range(std::span<std::byte> range) noexcept {
    mapping_bytes_.erase(range.data());
    memory_.release(range);
}

Frame Arena::adopt_into_frame(std::span<std::byte> slot) noexcept {
    usage_.range_bytes -= slot.size();
    charge(usage_.frame_bytes, slot.size());
    return {slot};
}

void Arena::return_to_range(const Frame& frame) noexcept {
    usage_.frame_bytes -= frame.slot.size();
    usage_.range_bytes += frame.slot.size();
    memory_.release(frame.slot);
}

bool Arena::try_count_small(std::size_t size_bytes) {
    if (!make_space(size_bytes, 0)) return false;
    charge(usage_.small_bytes, size_bytes);
    return true;
}

void Arena::count_small(std::ptrdiff_t delta_bytes) noexcept {
    charge(usage_.small_bytes, static_cast<std::size_t>(delta_bytes));
}

std::vector<Frame> Arena::take_registered_free_frames(std::size_t at_least_bytes) {
    std::vector<Frame> taken;
    taken.reserve(registered_free_frames_.size());
    std::size_t taken_bytes = 0;
    while (!registered_free_frames_.empty() && taken_bytes < at_least_bytes) {
        const auto first = registered_free_frames_.begin();
        taken.push_back(first->second);
        taken_bytes += first->first;
        usage_.free_frame_bytes -= first->first;
        usage_.frame_bytes += first->first;
        registered_free_frames_.erase(first);
    }
    return taken;
}

}  // namespace torch_offload
