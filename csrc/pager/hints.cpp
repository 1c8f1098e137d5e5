#include "pager/hints.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMostHints = 512;

/// Compares without becoming an owner.
bool is_same(const std::weak_ptr<Segment>& one, const std::shared_ptr<Segment>& other) noexcept {
    return !one.owner_before(other) && !other.owner_before(one);
}

}  // namespace

void Hints::add(const std::shared_ptr<Segment>& segment, std::uint64_t now, Owners& ended) {
    segment->awaited_since.store(now, std::memory_order_relaxed);
    if (waiting_.size() == kMostHints) waiting_.pop_front();
    if (holding_.size() == kMostHints) end(holding_.front().second, ended);
    waiting_.emplace_back(segment, now);
    holding_.emplace_back(segment, now);
}

std::shared_ptr<Segment> Hints::next(Owners& passed) {
    while (!waiting_.empty()) {
        std::shared_ptr<Segment> segment = waiting_.front().first.lock();
        if (segment && segment->last_use.load(std::memory_order_relaxed) == waiting_.front().second) return segment;
        waiting_.pop_front();
        passed.push_back(std::move(segment));
    }
    return nullptr;
}

void Hints::read(const std::shared_ptr<Segment>& segment) {
    if (!waiting_.empty() && is_same(waiting_.front().first, segment)) waiting_.pop_front();
}

void Hints::end(std::uint64_t time, Owners& ended) {
    while (!holding_.empty() && holding_.front().second <= time) {
        const auto [hinted, since] = std::move(holding_.front());
        holding_.pop_front();
        std::shared_ptr<Segment> segment = hinted.lock();
        if (!segment) continue;
        std::uint64_t expected = since;  // a later hint at the same segment holds on
        segment->awaited_since.compare_exchange_strong(expected, 0, std::memory_order_relaxed);
        ended.push_back(std::move(segment));
    }
}

}  // namespace torch_offload
