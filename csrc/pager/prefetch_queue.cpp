#include "pager/prefetch_queue.h"

#include <utility>

namespace torch_offload {
namespace {

constexpr std::size_t kMaxRequests = 512;
constexpr std::uint32_t kUsesOfHabit =
    8;  // an expert is used a few times for each request, a weight once in every step

/// Compares without becoming an owner.
bool is_same(const std::weak_ptr<Segment>& one, const std::shared_ptr<Segment>& other) noexcept {
    return !one.owner_before(other) && !other.owner_before(one);
}

}  // namespace

void PrefetchQueue::add(const std::shared_ptr<Segment>& segment, std::uint64_t now, Owners& ended) {
    segment->outstanding_since.store(now, std::memory_order_relaxed);
    segment->requested_uses.store(kUsesOfHabit, std::memory_order_relaxed);
    const auto is_earlier = [&](const Request& request) { return is_same(request.segment, segment); };
    std::erase_if(waiting_, is_earlier);
    std::erase_if(holding_, is_earlier);
    if (waiting_.size() == kMaxRequests) waiting_.pop_front();
    if (holding_.size() == kMaxRequests) end(holding_.front().time, ended);
    waiting_.push_back({segment, segment->size_bytes(), now});
    holding_.push_back(waiting_.back());
}

PrefetchQueue::Next PrefetchQueue::next(Owners& passed) {
    while (!waiting_.empty()) {
        const Request& first = waiting_.front();
        std::shared_ptr<Segment>& segment = passed.emplace_back();  // first: while nothing is owned this may fail
        segment = first.segment.lock();
        if (segment && segment->last_use.load(std::memory_order_relaxed) == first.time) {
            Next next{std::move(segment), bytes_before(first.time)};
            passed.pop_back();
            return next;
        }
        waiting_.pop_front();
    }
    return {};
}

void PrefetchQueue::read(const std::shared_ptr<Segment>& segment) {
    if (!waiting_.empty() && is_same(waiting_.front().segment, segment)) waiting_.pop_front();
}

void PrefetchQueue::end(std::uint64_t time, Owners& ended) {
    while (!holding_.empty() && holding_.front().time <= time) {
        std::shared_ptr<Segment>& segment = ended.emplace_back();
        segment = holding_.front().segment.lock();
        holding_.pop_front();
        if (segment) {
            segment->outstanding_since.store(0, std::memory_order_relaxed);
        } else {
            ended.pop_back();
        }
    }
}

std::size_t PrefetchQueue::bytes_before(std::uint64_t time) const noexcept {
    std::size_t sum_bytes = 0;
    for (const Request& request : holding_) {
        if (request.time >= time) break;
        sum_bytes += request.size_bytes;
    }
    return sum_bytes;
}

}  // namespace torch_offload
