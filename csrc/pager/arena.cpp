#include "pager/arena.h"

#include <algorithm>
#include <bit>
#include <new>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload {
namespace {

/// What is wanted counts half as much after some 45 more frames.
constexpr std::size_t kShareForgotten = 64;

/// Of new memory for smaller ranges, where there is room for it: so little that the peak is still what is used.
constexpr std::size_t kMaxBlockBytes = kHugePageBytes;
constexpr std::size_t kShareOfBlock = 128;

constexpr std::size_t kMinReleasedBytes = 64 * kKiB;

/// It costs less to make new memory of what is smaller.
constexpr std::size_t kMinMovedBytes = 2 * kSectorBytes;

}  // namespace

Arena::Arena(const ArenaOptions& options)
    : page_bytes_(options.page_bytes),
      huge_pages_(options.huge_pages),
      memory_(options.memory ? *options.memory : AddressSpace::process()) {
    usage_.limit_bytes = usage_.most_limit_bytes = options.limit_bytes;
    usage_.reserve_bytes = options.reserve_bytes;
}

Arena::~Arena() {
    for (const auto& [size, frame] : free_frames_) memory_.release(frame.slot);
    for (const auto& [size, frame] : registered_free_frames_) memory_.release(frame.slot);
    ranges_.for_each_unused([&](std::span<std::byte> block) { memory_.release(block); });
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

/// The memory of a part of a block that is in use as far as others know. False, with the memory there, if the system
/// does not take it.
bool Arena::release_part(std::span<std::byte> part, ArenaLock& lock) noexcept {
    if (!ranges_.is_block(part)) {
        try {
            const SystemCalls calls(*this, lock);
            memory_.decommit(part);
        } catch (const std::exception& error) {
            OFFLOAD_LOG(error, "memory is lost: ", error.what());
            return false;
        }
    }
    if (const std::optional<std::span<std::byte>> block = ranges_.lose(part)) {
        const SystemCalls calls(*this, lock);
        memory_.release(*block);
    }
    return true;
}

/// What has been idle for longest: what is wanted again and again, as in each layer of a model, is left alone.
/// False if nothing is idle.
bool Arena::release_idle(std::size_t wanted_bytes, ArenaLock& lock) {
    const std::optional<std::span<std::byte>> longest = ranges_.longest_idle(0);
    if (!longest) return false;
    std::span<std::byte> part = *longest;
    if (ranges_.is_divided(part)) part = part.last(std::min(part.size(), round_up(wanted_bytes, kMinReleasedBytes)));
    ranges_.take_within(part);
    if (!release_part(part, lock)) charge(usage_.range_bytes, part.size());
    usage_.idle_range_bytes -= part.size();
    return true;
}

/// Gives free memory back to the system until `size_bytes` more fit the limit. They do until the lock is given up
/// again.
bool Arena::make_space(std::size_t size_bytes, std::size_t reserve_bytes, ArenaLock& lock) {
    while (!has_space(size_bytes, reserve_bytes)) {
        if (release_idle(usage_.used_bytes() + reserve_bytes + size_bytes - usage_.limit_bytes, lock)) continue;
        if (free_frames_.empty()) return false;
        const auto largest = std::prev(free_frames_.end());
        const Frame frame = largest->second;
        free_frames_.erase(largest);
        release(frame.slot, usage_.free_frame_bytes, lock);
    }
    return true;
}

/// Turns what has been idle for longest into free frames: one of a block that is divided; as many as a whole block can
/// be, of which the rest goes back to the system. False if there is none that can be. If this throws, the rest was
/// given up.
bool Arena::take_apart(std::size_t frame_bytes, ArenaLock& lock) {
    if (memory_.keeps_place()) return false;
    const std::optional<std::span<std::byte>> found = ranges_.longest_idle(frame_bytes);
    if (!found) return false;
    const std::span<std::byte> part = ranges_.is_divided(*found) ? found->first(frame_bytes) : *found;
    ranges_.take_within(part);
    usage_.idle_range_bytes -= part.size();
    usage_.free_frame_bytes += part.size();
    Frames made;
    std::exception_ptr error;
    {
        const SystemCalls calls(*this, lock);
        made = make_frames_of(part, frame_bytes, error);
    }
    const std::size_t rest_bytes = part.size() - made.size() * frame_bytes;
    if (!release_part(part, lock)) charge(usage_.range_bytes, rest_bytes);
    usage_.free_frame_bytes -= rest_bytes;
    free_frames_.merge(made);
    if (error) std::rethrow_exception(error);
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
        Frames made;
        std::exception_ptr error;
        {
            const SystemCalls calls(*this, lock);
            made = make_frames_of(frame.slot, frame_bytes, error);
            memory_.release(frame.slot);
        }
        usage_.free_frame_bytes -= frame.slot.size() - made.size() * frame_bytes;
        free_frames_.merge(made);
        if (error) std::rethrow_exception(error);
        return true;
    }
    return false;
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
    return take_new_frame(size_bytes, lock);
}

/// Pre: there is space.
Frame Arena::take_new_frame(std::size_t size_bytes, ArenaLock& lock) {
    charge(usage_.frame_bytes, size_bytes);
    try {
        const SystemCalls calls(*this, lock);
        return make_frame(size_bytes);
    } catch (...) {
        usage_.frame_bytes -= size_bytes;
        throw;
    }
}

bool Arena::add_free_frame(std::size_t kept_bytes, ArenaLock& lock) {
    const std::size_t size_bytes = usual_frame_bytes();
    if (!has_space(size_bytes, usage_.reserve_bytes + kept_bytes)) return false;
    const Frame frame = take_new_frame(size_bytes, lock);
    {
        const SystemCalls calls(*this, lock);
        memory_.populate(frame.slot);
    }
    give_frame(frame, lock);
    return true;
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

/// Parts of a huge page do not move alone: the system keeps all of it while any part is used.
RangeHeap::Division Arena::division_of(std::size_t size_bytes) const noexcept {
    const bool is_huge = huge_pages_ == HugePages::allowed && size_bytes >= kHugePageBytes;
    return is_huge || memory_.keeps_place() ? RangeHeap::Division::whole : RangeHeap::Division::parts;
}

/// The smallest free frame in which `size_bytes` fit becomes a block where it is.
std::optional<std::span<std::byte>> Arena::divide_free_frame(std::size_t size_bytes, ArenaLock& lock) {
    const auto found = free_frames_.lower_bound(size_bytes);
    if (found == free_frames_.end() || division_of(found->first) != RangeHeap::Division::parts) return std::nullopt;
    const std::span<std::byte> block = found->second.slot;
    free_frames_.erase(found);
    usage_.free_frame_bytes -= block.size();
    count_block(block.size(), size_bytes);
    try {
        {
            const SystemCalls calls(*this, lock);
            memory_.hide_from_fork(block, false);
        }
        ranges_.add(block, size_bytes, RangeHeap::Division::parts);
    } catch (...) {
        give_block_up(block, size_bytes, lock);
        throw;
    }
    return block.first(size_bytes);
}

/// `size_bytes` of a block are a live range, the rest is idle.
void Arena::count_block(std::size_t block_bytes, std::size_t size_bytes) noexcept {
    charge(usage_.range_bytes, size_bytes);
    charge(usage_.idle_range_bytes, block_bytes - size_bytes);
}

/// One that was counted like this, and that nobody finds.
void Arena::give_block_up(std::span<std::byte> block, std::size_t size_bytes, ArenaLock& lock) noexcept {
    usage_.idle_range_bytes -= block.size() - size_bytes;
    usage_.range_bytes += block.size() - size_bytes;
    release(block, usage_.range_bytes, lock);
}

/// Adds the largest free frame that is not too large and whose memory may lie in such a block.
bool Arena::add_frame_to(Sources& sources, RangeHeap::Division division) noexcept {
    for (auto found = free_frames_.upper_bound(sources.missing_bytes); found != free_frames_.begin();) {
        --found;
        if (found->first < kMinMovedBytes) return false;
        if (division == RangeHeap::Division::parts && division_of(found->first) != division) continue;
        sources.missing_bytes -= found->first;
        usage_.free_frame_bytes -= found->first;
        usage_.idle_range_bytes += found->first;
        sources.frames.insert(free_frames_.extract(found));
        return true;
    }
    return false;
}

/// Adds what has been idle for longest in blocks that are divided, or as much of it as is missing.
bool Arena::add_part_to(Sources& sources) {
    if (sources.missing_bytes < kMinMovedBytes) return false;
    const auto longest = ranges_.longest_idle(kMinMovedBytes, RangeHeap::Division::parts);
    if (!longest) return false;
    const std::span<std::byte> part = longest->first(std::min(longest->size(), sources.missing_bytes));
    sources.parts.reserve(sources.parts.size() + 1);
    ranges_.take_within(part);
    sources.parts.push_back(part);
    sources.missing_bytes -= part.size();
    return true;
}

/// For a block, what is free in frames; where new memory for the rest does not fit the limit, what is idle as well, and
/// where that is not enough, room for it. Nothing if there is none. All of it is counted as idle.
std::optional<Arena::Sources> Arena::gather(std::size_t block_bytes, RangeHeap::Division division, ArenaLock& lock) {
    const bool is_whole = division == RangeHeap::Division::whole;
    Sources sources;
    sources.missing_bytes = block_bytes;
    try {
        while (sources.missing_bytes > 0 && !memory_.keeps_place()) {
            if (add_frame_to(sources, division)) continue;
            if (has_space(sources.missing_bytes, usage_.reserve_bytes)) break;
            if (is_whole && page_bytes_ != 0 && take_apart(usual_frame_bytes(), lock)) continue;
            if (!add_part_to(sources)) break;
        }
        if (make_space(sources.missing_bytes, usage_.reserve_bytes, lock)) return sources;
    } catch (...) {
        put_back(sources);
        throw;
    }
    put_back(sources);
    return std::nullopt;
}

/// As if they had not been gathered.
void Arena::put_back(Sources& sources) noexcept {
    for (const auto& [size, frame] : sources.frames) {
        usage_.idle_range_bytes -= size;
        usage_.free_frame_bytes += size;
    }
    free_frames_.merge(sources.frames);
    for (const std::span<std::byte> part : sources.parts) ranges_.give(part);
}

/// Of ranges that nobody uses: one of exactly that size, or a part of a block that can be divided.
std::optional<std::span<std::byte>> Arena::take_idle_range(std::size_t size_bytes) {
    std::optional<std::span<std::byte>> idle;
    if (division_of(size_bytes) == RangeHeap::Division::whole)
        idle = ranges_.take(size_bytes, RangeHeap::Division::whole);
    if (!idle) idle = ranges_.take(size_bytes, RangeHeap::Division::parts);
    if (!idle) return std::nullopt;
    usage_.idle_range_bytes -= size_bytes;
    charge(usage_.range_bytes, size_bytes);
    return idle;
}

std::optional<std::span<std::byte>> Arena::try_take_range(std::size_t size_bytes, ArenaLock& lock) {
    if (const auto idle = take_idle_range(size_bytes)) return idle;
    if (usage_.available_bytes() < size_bytes) return std::nullopt;
    std::size_t block_bytes = size_bytes;
    if (division_of(size_bytes) == RangeHeap::Division::parts) {
        if (const auto divided = divide_free_frame(size_bytes, lock)) return divided;
        const std::size_t usual_bytes = std::min(usage_.limit_bytes / kShareOfBlock, kMaxBlockBytes);
        const std::size_t whole_sectors = usual_bytes / kSectorBytes * kSectorBytes;
        if (has_space(whole_sectors, usage_.reserve_bytes)) block_bytes = std::max(size_bytes, whole_sectors);
    }
    const std::optional<Sources> sources = gather(block_bytes, division_of(size_bytes), lock);
    if (!sources) return std::nullopt;
    return make_block(*sources, block_bytes, size_bytes, lock);
}

/// Returns the first `size_bytes`, a live range.
std::span<std::byte> Arena::make_block(const Sources& sources, std::size_t block_bytes, std::size_t size_bytes,
                                       ArenaLock& lock) {
    usage_.idle_range_bytes -= block_bytes - sources.missing_bytes;
    count_block(block_bytes, size_bytes);
    const bool may_be_huge = division_of(size_bytes) == RangeHeap::Division::whole;
    std::span<std::byte> block;
    std::exception_ptr error;
    try {
        const SystemCalls calls(*this, lock);
        block = put_together(sources, block_bytes, may_be_huge ? huge_pages_ : HugePages::never);
    } catch (...) {
        error = std::current_exception();
        usage_.range_bytes -= size_bytes;
        usage_.idle_range_bytes -= block_bytes - size_bytes;
    }
    for (const std::span<std::byte> part : sources.parts) {
        if (!release_part(part, lock)) charge(usage_.range_bytes, part.size());
    }
    if (error) std::rethrow_exception(error);
    const bool has_huge =
        sources.missing_bytes >= kHugePageBytes || sources.frames.lower_bound(kHugePageBytes) != sources.frames.end();
    const bool is_whole = may_be_huge && (memory_.keeps_place() || has_huge);
    try {
        ranges_.add(block, size_bytes, is_whole ? RangeHeap::Division::whole : RangeHeap::Division::parts);
    } catch (...) {
        give_block_up(block, size_bytes, lock);
        throw;
    }
    return block.first(size_bytes);
}

/// 0 of the largest pages, 1 of half of them; nothing for other sizes, such as that of the last page of a tensor.
std::optional<std::size_t> Arena::index_of_page_size(std::size_t size_bytes) const noexcept {
    if (page_bytes_ % size_bytes != 0 || !std::has_single_bit(page_bytes_ / size_bytes)) return std::nullopt;
    const auto index = static_cast<std::size_t>(std::countr_zero(page_bytes_ / size_bytes));
    return index < wanted_bytes_.size() ? std::optional(index) : std::nullopt;
}

void Arena::note_wanted(std::size_t size_bytes) noexcept {
    const std::optional<std::size_t> index = index_of_page_size(size_bytes);
    if (!index) return;
    for (std::size_t& bytes : wanted_bytes_) bytes -= bytes / kShareForgotten;
    wanted_bytes_[*index] += size_bytes;
}

/// Of which size most memory was wanted lately.
std::size_t Arena::usual_frame_bytes() const noexcept {
    return page_bytes_ >> (std::max_element(wanted_bytes_.begin(), wanted_bytes_.end()) - wanted_bytes_.begin());
}

/// A block that begins with the memory of the sources, the largest frames first; the rest is new.
std::span<std::byte> Arena::put_together(const Sources& sources, std::size_t size_bytes, HugePages huge_pages) {
    const auto release_slots = [&] {
        for (const auto& [size, frame] : sources.frames) memory_.release(frame.slot);
    };
    std::span<std::byte> block;
    try {
        block = memory_.reserve(size_bytes, nullptr);
        std::byte* next = block.data();
        const auto move_in = [&](std::span<std::byte> memory) {
            memory_.move_unused(memory, next);
            next += memory.size();
        };
        for (auto frame = sources.frames.rbegin(); frame != sources.frames.rend(); ++frame) move_in(frame->second.slot);
        if (next > block.data()) memory_.hide_from_fork({block.data(), next}, false);
        for (const std::span<std::byte> part : sources.parts) move_in(part);
        if (sources.missing_bytes > 0) memory_.commit(block.last(sources.missing_bytes), huge_pages);
    } catch (...) {  // no more mappings: the memory is given up
        if (!block.empty()) memory_.release(block);
        release_slots();
        throw;
    }
    release_slots();
    return block;
}

void Arena::give_range(std::span<std::byte> range, ArenaLock&) noexcept {
    ranges_.give(range);
    usage_.range_bytes -= range.size();
    usage_.idle_range_bytes += range.size();
}

void Arena::take_back(std::span<std::byte> range, ArenaLock& lock) noexcept {
    if (!ranges_.is_taken(range)) {
        try {
            ranges_.add(range, range.size(), division_of(range.size()));
        } catch (const std::bad_alloc&) {
            release(range, usage_.range_bytes, lock);
            return;
        }
    }
    give_range(range, lock);
}

void Arena::take_addresses_back(std::span<std::byte> range, ArenaLock& lock) noexcept {
    if (!release_part(range, lock)) OFFLOAD_LOG(error, "addresses are lost");
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

void Arena::raise_limit(std::size_t size_bytes) noexcept {
    usage_.limit_bytes += size_bytes;
    usage_.most_limit_bytes = std::max(usage_.most_limit_bytes, usage_.limit_bytes);
}

bool Arena::lower_limit(std::size_t size_bytes, ArenaLock& lock) {
    if (usage_.available_bytes() < size_bytes || !make_space(size_bytes, usage_.reserve_bytes, lock)) return false;
    usage_.limit_bytes -= size_bytes;
    return true;
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
