#include "pager/range_heap.h"

#include <algorithm>
#include <iterator>

namespace torch_offload {

RangeHeap::Idle::node_type RangeHeap::make_node() {
    Idle one;
    return one.extract(one.emplace(0, nullptr).first);
}

void RangeHeap::enter_idle(Parts::iterator part) noexcept {
    part->second.use = Use::idle;
    part->second.node.value() = {part->second.size_bytes, part->first};
    idle_of(part->second).insert(std::move(part->second.node));
}

void RangeHeap::leave_idle(Parts::iterator part) noexcept {
    Idle& idle = idle_of(part->second);
    part->second.node = idle.extract(idle.find({part->second.size_bytes, part->first}));
}

/// Cuts a part that is not in an index in two, of which the second is returned.
RangeHeap::Parts::iterator RangeHeap::split(Parts::iterator part, std::size_t first_bytes) {
    Part second{.size_bytes = part->second.size_bytes - first_bytes,
                .block = part->second.block,
                .use = part->second.use,
                .division = part->second.division,
                .given = part->second.given,
                .node = make_node()};
    const auto made = parts_.emplace_hint(std::next(part), part->first + first_bytes, std::move(second));
    part->second.size_bytes = first_bytes;
    return made;
}

/// A part that is not in an index becomes one with its neighbors of the same use.
RangeHeap::Parts::iterator RangeHeap::join(Parts::iterator part) noexcept {
    const auto is_alike = [&](Parts::iterator other) {
        return other->second.block == part->second.block && other->second.use == part->second.use;
    };
    const auto absorb = [&](Parts::iterator other) {
        if (other->second.use == Use::idle) leave_idle(other);
        part->second.given = std::max(part->second.given, other->second.given);
    };
    if (const auto next = std::next(part); next != parts_.end() && is_alike(next)) {
        absorb(next);
        part->second.size_bytes += next->second.size_bytes;
        parts_.erase(next);
    }
    if (part == parts_.begin()) return part;
    const auto previous = std::prev(part);
    if (!is_alike(previous)) return part;
    absorb(previous);
    previous->second.size_bytes += part->second.size_bytes;
    previous->second.given = part->second.given;
    parts_.erase(part);
    return previous;
}

void RangeHeap::add(std::span<std::byte> block, std::size_t taken_bytes, Division division) {
    Part whole{.size_bytes = block.size(),
               .block = block.data(),
               .use = Use::taken,
               .division = division,
               .node = make_node()};
    const auto part = parts_.emplace(block.data(), std::move(whole)).first;
    try {
        blocks_.emplace(block.data(), block.size());
        if (taken_bytes < block.size()) enter_idle(taken_bytes == 0 ? part : split(part, taken_bytes));
    } catch (...) {
        blocks_.erase(block.data());
        parts_.erase(part);
        throw;
    }
}

std::optional<std::span<std::byte>> RangeHeap::take(std::size_t size_bytes, Division division) {
    const Idle& idle = idle_[static_cast<std::size_t>(division)];
    const auto found = idle.lower_bound({size_bytes, nullptr});
    if (found == idle.end() || (division == Division::whole && found->first != size_bytes)) return std::nullopt;
    const std::span part(found->second, size_bytes);
    take_within(part);
    return part;
}

void RangeHeap::take_within(std::span<std::byte> part) {
    auto found = std::prev(parts_.upper_bound(part.data()));
    leave_idle(found);
    try {
        if (found->first != part.data()) {
            const auto wanted = split(found, static_cast<std::size_t>(part.data() - found->first));
            enter_idle(found);
            found = wanted;
        }
        if (found->second.size_bytes != part.size()) enter_idle(split(found, part.size()));
    } catch (...) {
        enter_idle(join(found));
        throw;
    }
    found->second.use = Use::taken;
}

void RangeHeap::give(std::span<std::byte> part) noexcept {
    const auto found = parts_.find(part.data());
    found->second.use = Use::idle;
    found->second.given = ++given_count_;
    enter_idle(join(found));
}

std::optional<std::span<std::byte>> RangeHeap::lose(std::span<std::byte> part) noexcept {
    auto found = parts_.find(part.data());
    found->second.use = Use::without_memory;
    found = join(found);
    const auto block = blocks_.find(found->second.block);
    if (found->second.size_bytes != block->second) return std::nullopt;
    const std::span<std::byte> lost(block->first, block->second);
    parts_.erase(found);
    blocks_.erase(block);
    return lost;
}

std::optional<std::span<std::byte>> RangeHeap::longest_idle(std::size_t at_least_bytes) const noexcept {
    const auto whole = longest_idle(at_least_bytes, Division::whole);
    const auto part = longest_idle(at_least_bytes, Division::parts);
    if (!whole || !part) return whole ? whole : part;
    return given(*whole) < given(*part) ? whole : part;
}

std::optional<std::span<std::byte>> RangeHeap::longest_idle(std::size_t at_least_bytes,
                                                            Division division) const noexcept {
    std::optional<std::span<std::byte>> found;
    const Idle& idle = idle_[static_cast<std::size_t>(division)];
    for (auto entry = idle.lower_bound({at_least_bytes, nullptr}); entry != idle.end(); ++entry) {
        const std::span part(entry->second, entry->first);
        if (!found || given(part) < given(*found)) found = part;
    }
    return found;
}

std::uint64_t RangeHeap::given(std::span<std::byte> part) const noexcept {
    return parts_.find(part.data())->second.given;
}

bool RangeHeap::is_taken(std::span<std::byte> part) const noexcept {
    const auto found = parts_.find(part.data());
    return found != parts_.end() && found->second.size_bytes == part.size() && found->second.use == Use::taken;
}

bool RangeHeap::is_block(std::span<std::byte> part) const noexcept {
    const auto block = blocks_.find(part.data());
    return block != blocks_.end() && block->second == part.size();
}

bool RangeHeap::is_used(std::byte* block) const noexcept {
    for (auto part = parts_.find(block); part != parts_.end() && part->second.block == block; ++part) {
        if (part->second.use == Use::taken) return true;
    }
    return false;
}

bool RangeHeap::is_divided(std::span<std::byte> part) const noexcept {
    return parts_.find(part.data())->second.division == Division::parts;
}

}  // namespace torch_offload
