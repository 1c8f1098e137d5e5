#include "pager/arena.h"

#include <algorithm>
#include <bit>
#include <new>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload {
namespace {

/// What is wanted counts half as much after some 45 more frames.
constexpr std::size_t kShareForgotten = 64;

}  // namespace

Arena::Arena(const ArenaOptions& options)
    : piece_bytes_(options.piece_bytes),
      huge_pages_(options.huge_pages),
      memory_(options.memory ? *options.memory : AddressSpace::process()) {
    if (memory_.keeps_place()) piece_bytes_ = 0;  // ranges and frames are made of memory that can move in part
    usage_.limit_bytes = options.limit_bytes;
    usage_.reserve_bytes = options.reserve_bytes;
}

Arena::~Arena() {
    for (const auto& [size, frame] : free_frames_) memory_.release(frame.slot);
    for (const auto& [size, frame] : registered_free_frames_) memory_.release(frame.slot);
    for (const auto& [size, idle] : idle_ranges_) memory_.release(idle.range);
}

void Arena::charge(std::size_t& account, std::size_t size_bytes) noexcept {
    account += size_bytes;
    usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.used_bytes());
    const std::size_t other_bytes = usage_.range_bytes + usage_.small_bytes;
    other_peak_bytes_ = std::max(other_peak_bytes_, other_bytes);
    logged_peak_bytes_ = std::max(logged_peak_bytes_, other_bytes);
}

bool Arena::has_space(std::size_t size_bytes, std::size_t reserve_bytes) const noexcept {
    return usage_.used_bytes() + reserve_bytes + size_bytes <= usage_.limit_bytes;
}

/// Its lock is given up while this lives.
class Arena::SystemCalls {
public:
    SystemCalls(Arena& arena, ArenaLock& lock) noexcept : arena_(arena), lock_(lock.lock_) {
        ++arena_.changes_;
        lock.was_given_up_ = true;
        lock_.unlock();
    }
    ~SystemCalls() {
        lock_.lock();
        --arena_.changes_;
    }
    SystemCalls(const SystemCalls&) = delete;
    SystemCalls& operator=(const SystemCalls&) = delete;

private:
    Arena& arena_;
    std::unique_lock<std::mutex>& lock_;
};

/// To the system. Pre: nobody finds it here any more; `account` counts it until the system has it.
void Arena::release(std::span<std::byte> memory, std::size_t& account, ArenaLock& lock) noexcept {
    {
        const SystemCalls calls(*this, lock);
        memory_.release(memory);
    }
    account -= memory.size();
}

/// Whichever has been idle for longest of those that can be made `page_bytes` (0: anything), or the end: a size that is
/// wanted again and again, as in each layer of a model, is left alone.
Arena::IdleRanges::iterator Arena::longest_idle(std::size_t page_bytes) noexcept {
    auto found = idle_ranges_.end();
    for (auto idle = idle_ranges_.lower_bound(page_bytes); idle != idle_ranges_.end(); ++idle) {
        if (found != idle_ranges_.end() && found->second.given < idle->second.given) continue;
        if (page_bytes == 0 || can_become_pages(idle->second.range, page_bytes)) found = idle;
    }
    return found;
}

/// Still counted as idle.
std::span<std::byte> Arena::take_out(IdleRanges::iterator idle) noexcept {
    const std::span<std::byte> range = idle->second.range;
    idle_ranges_.erase(idle);
    mapping_bytes_.erase(range.data());
    return range;
}

/// Gives free memory back to the system until `size_bytes` more fit the limit. They do until the lock is given up
/// again.
bool Arena::make_space(std::size_t size_bytes, std::size_t reserve_bytes, ArenaLock& lock) {
    while (!has_space(size_bytes, reserve_bytes)) {
        if (!idle_ranges_.empty()) {
            release(take_out(longest_idle(0)), usage_.idle_range_bytes, lock);
        } else if (!free_frames_.empty()) {
            const auto largest = std::prev(free_frames_.end());
            const Frame frame = largest->second;
            free_frames_.erase(largest);
            release(frame.slot, usage_.free_frame_bytes, lock);
        } else {
            return false;
        }
    }
    return true;
}

/// Turns an idle range into free frames; what is left of it goes back to the system. False if there is none that can
/// be. If this throws, there are no more mappings, and the rest of the range was given up.
bool Arena::take_apart(std::size_t frame_bytes, ArenaLock& lock) {
    const auto found = longest_idle(frame_bytes);
    if (found == idle_ranges_.end()) return false;
    const std::span<std::byte> range = take_out(found);
    usage_.idle_range_bytes -= range.size();
    usage_.free_frame_bytes += range.size();
    make_frames(range, frame_bytes, lock);
    return true;
}

/// The same with the largest free frame that is several of `frame_bytes`.
bool Arena::take_frame_apart(std::size_t frame_bytes, ArenaLock& lock) {
    if (memory_.keeps_place()) return false;
    for (auto found = free_frames_.end(); found != free_frames_.begin();) {
        --found;
        if (found->first <= frame_bytes) return false;
        if (found->first % frame_bytes != 0) continue;
        const Frame frame = found->second;
        free_frames_.erase(found);
        make_frames(frame.slot, frame_bytes, lock);
        return true;
    }
    return false;
}

/// Turns memory that nobody finds and that is counted as free frames into some; the rest goes back to the system.
void Arena::make_frames(std::span<std::byte> memory, std::size_t frame_bytes, ArenaLock& lock) {
    Frames made;
    std::exception_ptr error;
    {
        const SystemCalls calls(*this, lock);
        made = make_frames_of(memory, frame_bytes, error);
        memory_.release(memory);
    }
    usage_.free_frame_bytes -= memory.size() - made.size() * frame_bytes;
    free_frames_.merge(made);
    if (error) std::rethrow_exception(error);
}

/// As many as there can be: `error` says why they are not all.
Arena::Frames Arena::make_frames_of(std::span<std::byte> range, std::size_t frame_bytes,
                                    std::exception_ptr& error) noexcept {
    Frames made;
    try {
        for (std::size_t begin = 0; begin + frame_bytes <= range.size(); begin += frame_bytes) {
            const auto entry = made.emplace(frame_bytes, Frame{});
            entry->second = move_into_frame(range.subspan(begin, frame_bytes));
        }
    } catch (...) {
        error = std::current_exception();
        std::erase_if(made, [](const auto& entry) { return !entry.second; });
    }
    return made;
}

Frame Arena::move_into_frame(std::span<std::byte> range) {
    const Frame frame{memory_.reserve(range.size(), nullptr)};
    try {
        memory_.move_unused(range, frame.slot.data());
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
std::optional<Frame> Arena::try_take_frame(std::size_t size_bytes, ArenaLock& lock) {
    note_wanted(size_bytes);
    std::optional<Frame> free = take_registered_frame(size_bytes);
    if (!free) free = take_free_frame(size_bytes);
    if (!free && !has_space(size_bytes, usage_.reserve_bytes) &&
        (take_apart(size_bytes, lock) || take_frame_apart(size_bytes, lock))) {
        free = take_free_frame(size_bytes);
    }
    if (free) {
        charge(usage_.frame_bytes, size_bytes);
        return free;
    }
    if (usage_.available_bytes() < size_bytes || !make_space(size_bytes, usage_.reserve_bytes, lock)) {
        return std::nullopt;
    }
    charge(usage_.frame_bytes, size_bytes);
    try {
        const SystemCalls calls(*this, lock);
        return make_frame(size_bytes);
    } catch (...) {
        usage_.frame_bytes -= size_bytes;
        throw;
    }
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

void Arena::give_frame(const Frame& frame, ArenaLock& lock) noexcept {
    const std::size_t size_bytes = frame.slot.size();
    if (frame.fixed_index != kUnregistered) {
        auto entry = registered_in_use_.extract(registered_in_use_.find(size_bytes));
        entry.mapped() = frame;
        registered_free_frames_.insert(std::move(entry));
    } else {
        try {
            free_frames_.emplace(size_bytes, frame);
        } catch (const std::bad_alloc&) {
            release(frame.slot, usage_.frame_bytes, lock);
            return;
        }
    }
    usage_.frame_bytes -= size_bytes;
    usage_.free_frame_bytes += size_bytes;
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
}

std::optional<std::span<std::byte>> Arena::try_take_range(std::size_t size_bytes, ArenaLock& lock) {
    if (const auto reuse = idle_ranges_.find(size_bytes); reuse != idle_ranges_.end()) {
        const std::span<std::byte> range = reuse->second.range;
        idle_ranges_.erase(reuse);
        usage_.idle_range_bytes -= size_bytes;
        charge(usage_.range_bytes, size_bytes);
        return range;
    }
    if (usage_.available_bytes() < size_bytes) return std::nullopt;
    while (!has_pieces_for(size_bytes) && !has_space(size_bytes, usage_.reserve_bytes)) {
        if (!take_apart(usual_frame_bytes(), lock)) break;
    }
    std::size_t pieces_bytes = 0;
    Frames pieces = take_pieces(size_bytes, pieces_bytes);
    charge(usage_.range_bytes, pieces_bytes);
    if (!make_space(size_bytes - pieces_bytes, usage_.reserve_bytes, lock)) {
        usage_.range_bytes -= pieces_bytes;
        usage_.free_frame_bytes += pieces_bytes;
        free_frames_.merge(pieces);
        return std::nullopt;
    }
    charge(usage_.range_bytes, size_bytes - pieces_bytes);
    Mappings mappings;
    std::span<std::byte> range;
    try {
        const SystemCalls calls(*this, lock);
        range = put_together(pieces, size_bytes, mappings);
    } catch (...) {
        usage_.range_bytes -= size_bytes;
        throw;
    }
    mapping_bytes_.merge(mappings);
    return range;
}

/// Whether a range can be put together from frames of that size, those of pages of one type of elements or another: any
/// of them divides a larger one, so that a range may begin with the larger and go on with the smaller.
bool Arena::is_piece(std::size_t size_bytes) const noexcept {
    if (piece_bytes_ == 0 || piece_bytes_ % size_bytes != 0 || size_bytes % kSectorBytes != 0) return false;
    const std::size_t per_largest = piece_bytes_ / size_bytes;
    return std::has_single_bit(per_largest) && piece_index(size_bytes) < wanted_bytes_.size();
}

/// 0 of the largest piece, 1 of half of it. Pre: it is a piece, or would be if it were not too small.
std::size_t Arena::piece_index(std::size_t size_bytes) const noexcept {
    return static_cast<std::size_t>(std::countr_zero(piece_bytes_ / size_bytes));
}

/// The last page of a tensor may be smaller than the others; what counts is of which size most memory is.
void Arena::note_wanted(std::size_t size_bytes) noexcept {
    if (!is_piece(size_bytes)) return;
    for (std::size_t& bytes : wanted_bytes_) bytes -= bytes / kShareForgotten;
    wanted_bytes_[piece_index(size_bytes)] += size_bytes;
}

/// Of the frames that were wanted lately.
std::size_t Arena::usual_frame_bytes() const noexcept {
    return piece_bytes_ >> (std::max_element(wanted_bytes_.begin(), wanted_bytes_.end()) - wanted_bytes_.begin());
}

/// Whether free frames are as much of a range as pages of the usual size could be.
bool Arena::has_pieces_for(std::size_t size_bytes) const noexcept {
    if (piece_bytes_ == 0) return true;
    const std::size_t smallest = usual_frame_bytes();
    std::size_t free_bytes = 0;
    for (std::size_t size = piece_bytes_; size >= smallest; size /= 2) free_bytes += free_frames_.count(size) * size;
    return free_bytes >= size_bytes / smallest * smallest;
}

/// As much of a range as free frames can be, `taken_bytes`, but none that are smaller than usual: a gradient has pages
/// of the size of its weight's. Uncounted: the caller says what they are now.
Arena::Frames Arena::take_pieces(std::size_t size_bytes, std::size_t& taken_bytes) noexcept {
    Frames pieces;
    if (piece_bytes_ == 0) return pieces;
    const std::size_t smallest = usual_frame_bytes();
    for (std::size_t size = piece_bytes_; size >= smallest; size /= 2) {
        while (taken_bytes + size <= size_bytes) {
            auto piece = free_frames_.extract(size);
            if (!piece) break;
            pieces.insert(std::move(piece));
            taken_bytes += size;
        }
    }
    usage_.free_frame_bytes -= taken_bytes;
    return pieces;
}

/// A range that begins with the memory of `pieces`, the largest first; the rest is new.
std::span<std::byte> Arena::put_together(const Frames& pieces, std::size_t size_bytes, Mappings& mappings) {
    const auto release_slots = [&] {
        for (const auto& [size, piece] : pieces) memory_.release(piece.slot);
    };
    std::span<std::byte> range;
    try {
        range = memory_.reserve(size_bytes, nullptr);
        if (!pieces.empty()) mappings[range.data()] = pieces.begin()->first;
        std::size_t filled_bytes = 0;
        for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
            memory_.move_unused(piece->second.slot, range.data() + filled_bytes);
            filled_bytes += piece->first;
        }
        if (filled_bytes > 0) memory_.hide_from_fork(range.first(filled_bytes), false);
        if (filled_bytes < range.size()) memory_.commit(range.subspan(filled_bytes), huge_pages_);
    } catch (...) {  // no more mappings: the memory is given up
        if (!range.empty()) memory_.release(range);
        release_slots();
        throw;
    }
    release_slots();
    return range;
}

bool Arena::can_become_pages(std::span<std::byte> range, std::size_t page_bytes) const {
    if (memory_.keeps_place()) return false;
    const auto found = mapping_bytes_.find(range.data());
    return found == mapping_bytes_.end() || found->second % page_bytes == 0;
}

std::size_t Arena::movable_page_bytes(std::span<std::byte> range, std::size_t page_bytes) const {
    for (std::size_t size = page_bytes; size == page_bytes || is_piece(size); size /= 2) {
        if (can_become_pages(range, size)) return size;
    }
    return 0;
}

void Arena::hand_over(std::span<std::byte> range) noexcept { mapping_bytes_.erase(range.data()); }

void Arena::take_back(std::span<std::byte> range, std::size_t page_bytes, ArenaLock& lock) noexcept {
    try {
        if (page_bytes < range.size()) mapping_bytes_[range.data()] = page_bytes;
    } catch (const std::bad_alloc&) {
        release(range, usage_.range_bytes, lock);
        return;
    }
    give_range(range, lock);
}

void Arena::give_range(std::span<std::byte> range, ArenaLock& lock) noexcept {
    try {
        idle_ranges_.emplace(range.size(), IdleRange{range, ++given_count_});
    } catch (const std::bad_alloc&) {
        mapping_bytes_.erase(range.data());
        release(range, usage_.range_bytes, lock);
        return;
    }
    usage_.range_bytes -= range.size();
    usage_.idle_range_bytes += range.size();
}

Frame Arena::adopt_into_frame(std::span<std::byte> slot) noexcept {
    usage_.range_bytes -= slot.size();
    charge(usage_.frame_bytes, slot.size());
    return {slot};
}

void Arena::return_to_range(const Frame& frame) noexcept {
    usage_.frame_bytes -= frame.slot.size();
    usage_.range_bytes += frame.slot.size();
}

bool Arena::try_count_small(std::size_t size_bytes, ArenaLock& lock) {
    if (!make_space(size_bytes, 0, lock)) return false;
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
