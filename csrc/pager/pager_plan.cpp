// Looking ahead: what is used when, what to evict before memory is short, what to read before it is pinned.
#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "base/log.h"
#include "base/units.h"
#include "pager/deadlines.h"
#include "pager/pager_guards.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxSpareBytes = 16 * kMiB;
// More where a store moves more within what it takes threads to find that out.
constexpr std::int64_t kSpareNs = 5'000'000;
constexpr std::size_t kMaxSpareBytesOfForward = 4 * kMiB;
constexpr std::size_t kMaxSpareBytesWhileLoading = 64 * kMiB;
constexpr std::size_t kMaxAhead = 256;        // segments
constexpr std::size_t kMaxUsesAhead = 4'096;  // of them, also where the same few come again and again
constexpr std::size_t kShareAhead = 3;        // one part in so many of the memory that pages will have is read ahead
constexpr std::size_t kShareAheadInWait = 2;  // while the program waits for other ranks
constexpr std::size_t kMinReads = 2;
// Of the budget, that reads on their way may take: of what comes next by the recording, and of what a caller wants.
constexpr std::size_t kShareOfAhead = 48;
constexpr std::size_t kShareOfWanted = 8;
// Of the budget, that is made free for segments that were requested and not used yet: the rest is for what is used
// meanwhile.
constexpr std::size_t kOutstandingShare = 4;
// An activation that leaves is written and read, a page that lies below already only read.
constexpr Distance kMovesOfActivation = 2;
constexpr UsePosition kOutstanding = 0;
constexpr UsePosition kUnrequested = kNever - 1;
constexpr std::int64_t kKickEveryNs = 1'000'000;

// A read begins so long before it has to: what the disk may stall, and what a computation may be faster than before. In
// a short pass that is a share of it: what comes earlier takes the place of pages that are read once more for it.
constexpr std::int64_t kMaxMarginNs = 100'000'000;
constexpr std::int64_t kMinMarginNs = 5'000'000;
constexpr std::int64_t kMarginShare = 8;

// Room for other memory is made so long before it is taken, besides what its bytes take to leave: what some writes
// need.
constexpr std::int64_t kRoomAheadNs = 30'000'000;

/// A read that failed is made again only for who needs it.
bool may_read_ahead(PageWord word) noexcept { return word.is_absent() && !word.has(PageWord::kTransferFailed); }

/// The place of a segment may be from when the pass was further on. What is read for its next use would go for what
/// comes later then, and be read again, without an end.
void rank_no_later(EvictionQueue& evictable, Segment& segment, UsePosition use) {
    if (!segment.eviction_rank || segment.eviction_rank->next_use <= use) return;
    evictable.put(segment, {use, segment.last_use.load(std::memory_order_relaxed)});
}

/// The role whose use triggers deferred work on the segment: its own, of a parameter.
TraceId work_role(const Segment& segment) {
    const TraceId anchor = segment.anchor_id;
    return anchor == kNoTrace ? segment.trace_id : anchor;
}

}  // namespace

/// When the segment is next used; the lock is held, as for all that takes `uses`. What a caller said is used soon comes
/// before all else. An activation is used nearer than it is, so much as it costs more to send it away; the recording
/// has one that is used right after it was made, as the last of a forward pass is, at one place for both. A segment
/// without uses of its own in the rest of the pass (a moment, a finished gradient) is next used by its deferred work,
/// which runs when the parameter it belongs to is first pinned: now, if it is pending, else in a pass that follows. A
/// moment that passes use by itself, because the backward or the step updates it, is next used there. What is requested
/// for each use, as routed experts are, is used by what the numbers say: what a pass without gradients used of it
/// predicts little.
UsePosition Pager::Impl::next_use(const Segment& segment, const UsePredictor::Held& uses) const {
    if (segment.outstanding_since.load(std::memory_order_relaxed) != 0) return kOutstanding;
    if (const UsePosition told = segment.told_use.load(std::memory_order_relaxed); told != 0) return told;
    const bool is_requested = segment.requested_uses.load(std::memory_order_relaxed) != 0;
    // What is requested can be read in time, so it goes before what would be missed.
    if (is_requested && !(uses->has_prediction() && uses->is_training())) return kNever;
    if (!uses->has_prediction()) return kUnrequested;
    const bool is_anchored = segment.anchor_id != kNoTrace;
    const Distance own = uses->next_in_pass(segment.trace_id);
    const Distance anchor = is_anchored && segment.has_pending() ? uses->next_in_pass(segment.anchor_id) : kNever;
    const Distance soonest = std::min(own, anchor);
    const bool is_activation = segment.kind() == SegmentKind::activation;
    if (soonest != kNever) return uses->position_of(is_activation ? soonest / kMovesOfActivation : soonest);
    if (is_activation && uses->is_at_one_place(segment.trace_id)) return uses->position_of(0);
    const bool is_alone = segment.kind() == SegmentKind::state && uses->first_in_following(segment.trace_id) != kNever;
    const bool is_with_anchor = is_anchored && !is_alone;
    return uses->position_of(uses->first_in_following(is_with_anchor ? segment.anchor_id.load() : segment.trace_id));
}

/// Puts the segment where it belongs among those that could go.
void Pager::Impl::rank(Segment& segment, const UsePredictor::Held& uses) {
    evictable.put(segment, {next_use(segment, uses), segment.last_use.load(std::memory_order_relaxed)});
}

/// The same for those whose next use is another one now.
void Pager::Impl::rank_again(std::span<const std::shared_ptr<Segment>> changed) {
    const std::lock_guard lock(mutex);
    const UsePredictor::Held uses = predictor->hold();
    for (const std::shared_ptr<Segment>& segment : changed) {
        if (segment->eviction_rank) rank(*segment, uses);
    }
}

/// The same for all that are there, after the prediction has changed.
void Pager::Impl::rank_all(const UsePredictor::Held& uses) {
    std::vector<Segment*> all;
    for (const EvictionQueue::Entry& entry : evictable) all.push_back(entry.segment);
    for (Segment* segment : all) rank(*segment, uses);
    ranked_predictions = uses.prediction_count();
    ranked_uses = uses->recorded_count();
}

/// The same for what the program has used in the tier above since the last time: only who chooses what goes has to
/// know, so a use above does not come here.
void Pager::Impl::rank_used_above() {
    std::vector<std::shared_ptr<Segment>> used;  // outlives the lock
    const std::lock_guard lock(mutex);
    if (!follows) return;
    const UsePredictor::Held uses = predictor->hold();
    const std::size_t first = std::max<std::size_t>(ranked_uses, 1) - 1;  // the last one may have come again
    const std::size_t count = uses->recorded_count();
    if (uses.prediction_count() != ranked_predictions || count > first + evictable.size()) return rank_all(uses);
    used.reserve(count - std::min(first, count));
    for (std::size_t i = first; i < count; ++i) {
        const TraceId role = uses->recorded(i);
        used.push_back(role < roles.size() ? roles[role].lock() : nullptr);
        if (used.back() && used.back()->eviction_rank) rank(*used.back(), uses);
    }
    ranked_uses = count;
}

/// Of a tier below: the segment is updated together with that of the role; the lock is held.
void Pager::Impl::note_anchor(Segment& segment, TraceId anchor) {
    std::vector<std::weak_ptr<Segment>>& together = anchored[anchor];
    std::erase_if(together, [](const std::weak_ptr<Segment>& member) { return member.expired(); });
    together.push_back(segment.weak_from_this());
}

/// What deferred work in the tier above updates together with the segment, itself included, as far as it is here.
std::vector<std::shared_ptr<Segment>> Pager::Impl::updated_above(const Segment& segment) {
    const TraceId role = work_role(segment);
    std::vector<std::shared_ptr<Segment>> updated;  // outlives the lock
    {
        const std::lock_guard lock(mutex);
        const std::vector<std::weak_ptr<Segment>>& together = anchored[role];
        updated.reserve(together.size() + 1);
        if (role < roles.size()) updated.push_back(roles[role].lock());
        for (const std::weak_ptr<Segment>& member : together) updated.push_back(member.lock());
    }
    std::erase_if(updated, [&](const std::shared_ptr<Segment>& member) {
        return !member || !member->has_work_above() || work_role(*member) != role ||
               member->page_count() != segment.page_count();
    });
    return updated;
}

/// What the recording says comes next, as much as a share holds of what the budget leaves beside other memory until
/// then: more would give way to that memory and be read again. While the program waits for other ranks it is half of
/// that, for what is to be updated all of it.
Outlook Pager::Impl::upcoming_segments() {
    Outlook outlook{.margin_ns = kMaxMarginNs};
    std::vector<std::shared_ptr<Segment>> looked_at;  // outlives the lock: the last owner of a segment takes it
    looked_at.reserve(kMaxAhead);                     // what fails to be added would end under it
    std::unordered_set<TraceId> seen;
    const bool is_in_rank_wait = service->is_in_rank_wait();
    std::size_t planned_bytes = 0;
    const double read_rate = store->status().read_rate;
    const std::lock_guard lock(mutex);
    const UsePredictor::Held uses = predictor->hold();
    const std::int64_t since_use_ns = uses.since_last_ns();
    const ArenaUsage usage = arena.usage();
    const std::size_t other_bytes = usage.range_bytes + usage.small_bytes;
    std::size_t expected_other_bytes = other_bytes;
    std::size_t peak_other_bytes = other_bytes;  // until the use that is looked at
    for (std::size_t distance = 0; distance < kMaxUsesAhead; ++distance) {
        if (seen.size() >= kMaxAhead) break;
        const std::optional<UpcomingUse> use = uses->upcoming(distance);
        // Before a weight is used after a training step, it is updated below: what came earlier would be worthless.
        const bool is_following = uses->position_of(distance) >= uses->length();
        if (!use || (options.updates_below && uses->is_training() && is_following)) break;
        const std::int64_t due_ns = use->after_ns - since_use_ns;
        const std::size_t recorded_bytes = follows ? 0 : use->other_bytes;  // is in the memory above
        peak_other_bytes = std::max(peak_other_bytes, recorded_bytes);
        const std::size_t growth_bytes = recorded_bytes - std::min(recorded_bytes, other_bytes);
        const bool is_soon = due_ns < kRoomAheadNs + transfer_ns(growth_bytes, read_rate);
        if (is_soon) expected_other_bytes = std::max(expected_other_bytes, recorded_bytes);
        if (!seen.insert(use->id).second) continue;
        if (use->id >= roles.size()) continue;
        const std::shared_ptr<Segment>& segment = looked_at.emplace_back(roles[use->id].lock());
        if (!segment) continue;
        if (!uses->is_training() && segment->requested_uses.load(std::memory_order_relaxed) != 0) continue;
        const bool is_updated_here = segment->has_pending() && !options.updates_below;
        const std::size_t left_bytes = options.budget_bytes - std::min(options.budget_bytes, peak_other_bytes);
        const std::size_t share = !is_in_rank_wait ? kShareAhead : is_updated_here ? 1 : kShareAheadInWait;
        if (planned_bytes >= left_bytes / share) break;
        const UsePosition use_position = uses->position_of(distance);
        rank_no_later(evictable, *segment, use_position);
        planned_bytes += segment->size_bytes() * (is_updated_here ? 4 : 1);  // weight, gradient, two moments
        outlook.segments.push_back({segment, use_position, due_ns, 0});
    }
    outlook.growth_bytes = expected_other_bytes - other_bytes;
    if (uses->pass_ns() > 0) {
        outlook.margin_ns = std::clamp(uses->pass_ns() / kMarginShare, kMinMarginNs, kMaxMarginNs);
    }
    return outlook;
}

/// Bytes that have to be read before the segment can be used, those on their way included.
std::size_t Pager::Impl::missing_bytes(Segment& segment) {
    const auto count = [this](const Segment& member) {
        std::size_t missing = 0;
        for (std::size_t i = 0; i < member.page_count(); ++i) {
            const PageWord word = member.page(i).load();
            const bool is_away = word.state() == PageState::stored || word.state() == PageState::loading;
            const bool is_outdated = word.has(PageWord::kPending) && options.updates_below;
            const bool is_missing = is_outdated || (is_away && !member.is_above(i));
            missing += is_missing ? member.frame_bytes(i) : 0;
        }
        return missing;
    };
    if (!segment.has_pending() || options.updates_below) return count(segment);
    std::size_t missing = 0;
    for (const std::shared_ptr<Segment>& member : members_of(segment)) missing += count(*member);
    return missing;
}

void Pager::Impl::find_slack(std::vector<Ahead>& ahead) {
    std::vector<DueReads> reads;
    reads.reserve(ahead.size());
    for (const Ahead& next : ahead) reads.push_back({next.due_ns, missing_bytes(*next.segment)});
    const std::vector<std::int64_t> slack = slack_of(reads, store->status().read_rate);
    for (std::size_t i = 0; i < ahead.size(); ++i) ahead[i].slack_ns = slack[i];
}

/// Free memory that reads ahead of use leave to demand, and writes under way make up for. Before there is a prediction,
/// a model is being loaded or laid out: nothing is known to be used soon, and much has to be written. Passes without
/// gradients change next to nothing: what they need is there at once.
std::size_t Pager::Impl::spare_bytes() {
    const std::lock_guard lock(mutex);
    const UsePredictor::Held uses = predictor->hold();
    if (!uses->has_prediction()) return std::min(options.budget_bytes / 8, kMaxSpareBytesWhileLoading);
    if (!uses->is_training()) return std::min(options.budget_bytes / 32, kMaxSpareBytesOfForward);
    const auto moved_bytes = static_cast<std::size_t>(store->status().read_rate * static_cast<double>(kSpareNs) / 1e9);
    return std::min(options.budget_bytes / 32, std::max(kMaxSpareBytes, moved_bytes));
}

/// Reads on their way hold memory that no page uses: as many as keep a disk busy, fewer where memory is small.
std::size_t Pager::Impl::most_reads_ahead(std::size_t page_bytes, std::size_t share) const noexcept {
    const std::size_t in_budget = options.budget_bytes / share / page_bytes;
    return std::clamp(in_budget, kMinReads, std::max(kMinReads, store->status().capacity / 2));
}

/// Evicts what is used last so that the next read or allocation finds memory without waiting for a write.
void Pager::Impl::keep_free(std::size_t free_bytes, UsePosition keep_before) {
    std::size_t expected_bytes = evicting_bytes.load(std::memory_order_acquire);
    {
        const std::lock_guard lock(mutex);
        expected_bytes += arena.usage().available_bytes();
    }
    if (expected_bytes < free_bytes) expected_bytes += lease(free_bytes - expected_bytes);
    if (expected_bytes < free_bytes) evict_for(free_bytes - expected_bytes, keep_before);
}

/// Reads what cannot wait any longer. What is read before it has to be takes the place of pages that could have been
/// used meanwhile, so each byte read early is likely to move twice. Deferred work has to read and write its pages once,
/// whenever it is: while the program waits for other ranks nothing else wants the disk and the cores for it.
void Pager::Impl::look_ahead() noexcept {
    try {
        read_what_is_due();
        make_frame_ahead();
    } catch (const std::exception& error) {  // not lost: the pin that needs it meets the same
        OFFLOAD_LOG(info, "looking ahead failed: ", error.what());
    }
}

void Pager::Impl::read_what_is_due() {
    const Transient transient(*this);
    read_requested();
    Outlook outlook = upcoming_segments();
    find_slack(outlook.segments);
    const auto first_with = [&](std::int64_t slack_ns) {
        return std::find_if(outlook.segments.begin(), outlook.segments.end(),
                            [slack_ns](const Ahead& next) { return next.slack_ns >= slack_ns; });
    };
    const auto relaxed = first_with(outlook.margin_ns);
    // Memory is kept free for what comes late: not at the cost of what is used soon, which would be written and read.
    const auto unprotected = first_with(kMaxMarginNs);
    const UsePosition keep_before = unprotected == outlook.segments.begin() ? 0 : std::prev(unprotected)->use + 1;
    keep_free(spare_bytes() + outlook.growth_bytes, std::max(keep_before, kOutstanding + 1));
    const bool is_idle = service->is_in_rank_wait();
    for (auto next = outlook.segments.begin(); next != outlook.segments.end(); ++next) {
        const bool is_wanted = next < relaxed || (is_idle && next->segment->has_pending());
        if (is_wanted && !read_ahead(next->segment, next->use, UpdateTime::while_program_waits)) return;
    }
}

/// A request has come true. What earlier ones keep in memory, which nobody has used by now, may go like anything else.
void Pager::Impl::end_requests(std::uint64_t time) {
    PrefetchQueue::Owners ended;  // outlives the lock
    {
        const std::lock_guard lock(mutex);
        prefetch_queue.end(time, ended);
    }
    rank_again(ended);
}

/// Reads what callers have requested, in their order, until memory or the queue is short. Goes on at the next look
/// ahead.
void Pager::Impl::read_requested() {
    while (true) {
        PrefetchQueue::Next next;
        std::size_t free_bytes = 0;
        PrefetchQueue::Owners passed;  // outlives the lock
        {
            const std::lock_guard lock(mutex);
            next = prefetch_queue.next(passed);
            free_bytes = arena.usage().available_bytes();
        }
        if (!next.segment) return;
        const bool may_evict = next.bytes_before <= options.budget_bytes / kOutstandingShare;
        if (!may_evict && free_bytes < next.segment->size_bytes() + spare_bytes()) return;
        if (!read_wanted(next.segment)) return;
        const std::lock_guard lock(mutex);
        prefetch_queue.read(next.segment);
    }
}

/// As read_ahead(), for who knows that it is next: more reads at once.
bool Pager::Impl::read_wanted(const std::shared_ptr<Segment>& segment) {
    if (segment->has_pending()) return read_ahead(segment, 0, UpdateTime::at_once);
    for (std::size_t i = 0; i < segment->page_count(); ++i) {
        if (!may_read_ahead(segment->page(i).load()) || segment->is_above(i)) continue;
        const std::size_t most = most_reads_ahead(segment->frame_bytes(i), kShareOfWanted);
        if (store->status().reads_in_flight >= most || !start_reading(segment, i, 0)) return false;
    }
    return true;
}

/// Reads the pages of the index that deferred work in the tier above needs. False once memory or the queue is short.
bool Pager::Impl::read_ahead_for_above(std::span<const std::shared_ptr<Segment>> updated, std::size_t index,
                                       UsePosition use) {
    for (const std::shared_ptr<Segment>& member : updated) {
        const PageWord word = member->page(index).load();
        const bool is_missing = word.state() == PageState::stored && may_read_ahead(word) && !member->is_above(index);
        if (is_missing && !read_ahead_page(member, index, use)) return false;
    }
    return true;
}

/// False once memory or the queue is short.
bool Pager::Impl::read_ahead(const std::shared_ptr<Segment>& segment, UsePosition use, UpdateTime time) {
    // The step that makes the states uses them once; from then on updates do, and they have them below.
    if (options.updates_below && segment->kind() == SegmentKind::state) return true;
    const auto updated_above =
        segment->has_work_above() ? members_of(*segment) : std::vector<std::shared_ptr<Segment>>{};
    for (std::size_t i = 0; i < segment->page_count(); ++i) {
        if (!read_ahead_for_above(updated_above, i, use)) return false;
        const PageWord word = segment->page(i).load();
        if (word.has(PageWord::kPending)) {
            if (!start_update_below(segment, i, time) && !read_ahead_update(segment, i, use, time)) return false;
        } else if (may_read_ahead(word) && !segment->is_above(i) && !read_ahead_page(segment, i, use)) {
            return false;
        }
    }
    return true;
}

bool Pager::Impl::read_ahead_page(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use) {
    if (store->status().reads_in_flight >= most_reads_ahead(segment->page_bytes(), kShareOfAhead)) return false;
    return start_reading(segment, index, use);
}

/// False if memory is short.
bool Pager::Impl::start_reading(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use) {
    Page& page = segment->page(index);
    const std::optional<Frame> free = try_acquire_frame(segment->frame_bytes(index), use + 1);
    if (!free) return false;
    FrameHold frame(*this, *free);
    if (load_into(page, PageGoal::read, frame)) prefetches.increment();
    return true;
}

/// Reads every page that the deferred work on page `index` needs and hands the work to the service thread.
bool Pager::Impl::read_ahead_update(const std::shared_ptr<Segment>& segment, std::size_t index, UsePosition use,
                                    UpdateTime time) {
    bool all_in_memory = true;
    for (const std::shared_ptr<Segment>& member : members_of(*segment)) {
        const PageWord word = member->page(index).load();
        if (may_read_ahead(word) && !read_ahead_page(member, index, use)) return false;
        all_in_memory = all_in_memory && member->page(index).load().in_memory();
    }
    if (all_in_memory) queue_update(segment, index, time);
    return true;
}

/// Hands the deferred work on the page to the service thread, unless it has it.
void Pager::Impl::queue_update(const std::shared_ptr<Segment>& segment, std::size_t index, UpdateTime time) {
    Page& page = segment->page(index);
    PageWord seen = page.load();
    if (!seen.has(PageWord::kPending)) return;
    if (seen.has(PageWord::kUpdateQueued) && time != UpdateTime::at_once) return;
    if (!page.change(seen, seen.with_flag(PageWord::kUpdateQueued))) return;
    try {
        service->push_update(segment, index, time);
    } catch (...) {
        page.clear_flag(PageWord::kUpdateQueued);
        throw;
    }
}

void Pager::Impl::kick_if_due() noexcept {
    const std::int64_t now_ns = steady_ns();
    std::int64_t last_ns = last_kick_ns.load(std::memory_order_relaxed);
    if (now_ns - last_ns < kKickEveryNs) return;
    if (last_kick_ns.compare_exchange_strong(last_ns, now_ns, std::memory_order_relaxed)) store->kick();
}

}  // namespace torch_offload
