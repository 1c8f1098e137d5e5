// Looking ahead: what is used when, what to evict before memory is short, what to read before it is pinned.
#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "base/units.h"
#include "pager/pager_impl.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxHeadroomBytes = 128 * kMiB;
constexpr std::int64_t kKickEveryNs = 1'000'000;

}  // namespace

/// How many recorded pins lie ahead of the segment's next use; the lock is held. A segment without uses of its own in
/// the rest of the step (a moment, a finished gradient) is next used by its deferred work, which runs when the
/// parameter it belongs to is first pinned: now, if it is pending, else in the following step.
Distance Pager::Impl::next_use(const Segment& segment, bool is_pending) const {
    if (!trace.has_prediction()) return kNever;
    const Distance own = trace.next_in_step(segment.trace_id);
    if (segment.anchor_id == kNoTrace) {
        return own != kNever ? own : trace.first_in_following_step(segment.trace_id);
    }
    const Distance anchor = is_pending ? trace.next_in_step(segment.anchor_id) : kNever;
    const Distance soonest = std::min(own, anchor);
    return soonest != kNever ? soonest : trace.first_in_following_step(segment.anchor_id);
}

/// The segments that the recording says come next, each with its distance, as many as a share of the budget holds.
std::vector<Pager::Impl::Ahead> Pager::Impl::upcoming_segments() {
    std::vector<Ahead> ahead;
    std::unordered_set<TraceId> seen;
    const std::size_t window_bytes = options.budget_bytes / 3;
    std::size_t planned_bytes = 0;
    const std::lock_guard lock(mutex);
    for (std::size_t distance = 0; planned_bytes < window_bytes; ++distance) {
        const std::optional<TraceId> id = trace.upcoming(distance);
        if (!id) break;
        if (!seen.insert(*id).second) continue;
        std::shared_ptr<Segment> segment = *id < roles.size() ? roles[*id].lock() : nullptr;
        if (!segment) continue;
        const bool is_pending = segment->page(0).load().has(PageWord::kPending);
        planned_bytes += segment->size_bytes() * (is_pending ? 4 : 1);  // weight, gradient, two moments
        ahead.push_back({std::move(segment), distance});
    }
    return ahead;
}

std::size_t Pager::Impl::headroom_bytes() const noexcept {
    return std::min(options.budget_bytes / 10, kMaxHeadroomBytes);
}

/// Evicts what is used last so that the next read or allocation finds memory without waiting for a write.
void Pager::Impl::keep_headroom(Distance horizon) {
    std::size_t coming_bytes = leaving_bytes.load(std::memory_order_acquire);
    {
        const std::lock_guard lock(mutex);
        coming_bytes += arena.usage().available_bytes();
    }
    const std::size_t target_bytes = headroom_bytes();
    if (coming_bytes < target_bytes) evict_for(target_bytes - coming_bytes, horizon);
}

void Pager::Impl::look_ahead() {
    const Transient transient(*this);
    const std::vector<Ahead> ahead = upcoming_segments();
    keep_headroom(ahead.empty() ? 0 : ahead.back().use + 1);
    for (const Ahead& next : ahead) {
        if (!read_ahead(next.segment, next.use)) return;
    }
}

/// False once memory or the queue is short.
bool Pager::Impl::read_ahead(const std::shared_ptr<Segment>& segment, Distance use) {
    for (std::size_t i = 0; i < segment->page_count(); ++i) {
        const PageWord word = segment->page(i).load();
        if (word.has(PageWord::kPending)) {
            if (!read_ahead_update(segment, i, use)) return false;
        } else if (word.is_absent() && !read_ahead_page(segment, i, use)) {
            return false;
        }
    }
    return true;
}

bool Pager::Impl::read_ahead_page(const std::shared_ptr<Segment>& segment, std::size_t index, Distance use) {
    if (mover->in_flight() >= 2 * mover->capacity()) return false;
    Page& page = segment->page(index);
    const std::optional<Frame> frame = try_acquire_frame(segment->frame_bytes(index), use + 1);
    if (!frame) return false;
    if (load_into(segment, page, Access::read, *frame)) {
        prefetches.increment();
        return true;
    }
    const std::lock_guard lock(mutex);
    arena.give_frame(*frame);
    return true;
}

/// Reads every page that the deferred work on page `index` needs and hands the work to the service thread.
bool Pager::Impl::read_ahead_update(const std::shared_ptr<Segment>& segment, std::size_t index, Distance use) {
    bool all_in_memory = true;
    for (const std::shared_ptr<Segment>& member : members_of(*segment)) {
        const PageWord word = member->page(index).load();
        if (word.is_absent() && !read_ahead_page(member, index, use)) return false;
        all_in_memory = all_in_memory && member->page(index).load().in_memory();
    }
    Page& page = segment->page(index);
    PageWord seen = page.load();
    if (!all_in_memory || !seen.has(PageWord::kPending) || seen.has(PageWord::kUpdateQueued)) return true;
    if (page.change(seen, seen.with_flag(PageWord::kUpdateQueued))) service->push_update(segment, index);
    return true;
}

void Pager::Impl::kick_if_due() noexcept {
    const std::int64_t now_ns = std::chrono::steady_clock::now().time_since_epoch().count();
    std::int64_t last_ns = last_kick_ns.load(std::memory_order_relaxed);
    if (now_ns - last_ns < kKickEveryNs) return;
    if (last_kick_ns.compare_exchange_strong(last_ns, now_ns, std::memory_order_relaxed)) mover->kick();
}

}  // namespace torch_offload
