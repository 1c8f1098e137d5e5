#include "pager/tier_store.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/activity_log.h"
#include "base/check.h"
#include "base/engine_thread.h"
#include "base/log.h"
#include "base/units.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::size_t kCopiesUnderWay = 4;  // per direction: one that is copied, one that waits, their neighbours
constexpr std::size_t kCapacity = 64;       // half of it for reads ahead of use: a link is faster than threads wake up

// What the lanes pin at once, and as much to come and go.
constexpr std::size_t kMinPagesBelow = 2 * kLinkDirectionCount * kCopiesUnderWay;
constexpr std::size_t kWidestElementBytes = 4;
constexpr double kFirstReadRate = 4e9;  // bytes per second, until there is a measurement

/// Of the exception that is being handled: a page is lost only if the tier below has lost it, not where that lacks
/// memory or a disk fails.
TransferEnd failed_end() {
    const std::exception_ptr error = std::current_exception();
    try {
        std::rethrow_exception(error);
    } catch (const CorruptPage&) {
        return {TransferStatus::lost, error};
    } catch (...) {
        return {TransferStatus::not_now, error};
    }
}

}  // namespace

TierStore::TierStore(Pager& below, Device& device, bool activations_stay)
    : below_(below), device_(device), activations_stay_(activations_stay), read_rate_(kFirstReadRate) {
    const std::size_t least_bytes = kMinPagesBelow * below.options().page_elements * kWidestElementBytes;
    OFFLOAD_CHECK(below.options().budget_bytes >= least_bytes, InvalidArgument, "host memory tier: a budget of ",
                  below.options().budget_bytes, " bytes is too small to feed a device, which takes ", least_bytes,
                  "; raise `ram`, or lower the page size");
}

TierStore::~TierStore() { stop(); }

void TierStore::start(StoreClient& client) {
    client_ = &client;
    below_.follow(client.use_predictor());
    to_device_.thread = engine_thread("to-up", [this] { run(to_device_); });
    to_host_.thread = engine_thread("to-down", [this] { run(to_host_); });
    planner_ = engine_thread("to-plan", [this] { look_ahead_when_kicked(); });
}

/// Also where start() had no room for all of its threads.
bool TierStore::stop() {
    stopping_.store(true, std::memory_order_release);
    wake_planner();
    if (planner_.joinable()) planner_.join();  // first: it makes transfers
    for (Lane* lane : {&to_device_, &to_host_}) {
        if (!lane->thread.joinable()) continue;
        {
            const std::lock_guard lock(lane->mutex);
            lane->is_ending = true;
        }
        lane->changed.notify_one();
        lane->thread.join();
    }
    return true;
}

/// The page below begins to come as well: the lane may have others to wait for before it asks.
void TierStore::read(std::shared_ptr<Segment> segment, Page& page) {
    if (const std::shared_ptr<Segment> backing = segment->backing()) {
        below_.prefetch_page(backing, segment->index_of(page));
    }
    enqueue(to_device_, std::move(segment), page);
}

void TierStore::write(std::shared_ptr<Segment> segment, Page& page) { enqueue(to_host_, std::move(segment), page); }

void TierStore::enqueue(Lane& lane, std::shared_ptr<Segment> segment, Page& page) {
    Transfers one;
    one.push_back({std::move(segment), &page, PinGuard(), nullptr, 0});  // nothing has changed if this fails
    lane.in_flight.fetch_add(1);
    {
        const std::lock_guard lock(lane.mutex);
        lane.waiting.splice(lane.waiting.end(), one);
    }
    lane.changed.notify_one();
}

void TierStore::evict(Segment& segment) {
    if (const std::shared_ptr<Segment> backing = segment.backing()) below_.evict(backing);
}

/// The pager below looks ahead as often.
void TierStore::kick() noexcept {
    wake_planner();
    below_.kick();
}

void TierStore::wake_planner() noexcept {
    kicks_.fetch_add(1, std::memory_order_acq_rel);
    kicks_.notify_one();
}

StoreStatus TierStore::status() const noexcept { return {to_device_.in_flight.load(), kCapacity, read_rate_.rate()}; }

StoreStatistics TierStore::statistics() const {
    StoreStatistics statistics;
    statistics.engine = device_.name();
    return statistics;
}

/// Which they are is known to their threads; what those wait for below is listed there.
std::vector<std::string> TierStore::describe_transfers(std::size_t) {
    const std::size_t up = to_device_.in_flight.load();
    const std::size_t down = to_host_.in_flight.load();
    if (up + down == 0) return {};
    return {concat(device_.name(), ": ", up, " copies to the device and ", down, " to the host are under way")};
}

// --- Updates ------------------------------------------------------------------------------------------------------

UpdateLatch TierStore::latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                        bool may_wait) {
    std::vector<std::shared_ptr<Segment>> backing_segments;
    for (const std::shared_ptr<Segment>& segment : segments) {
        backing_segments.push_back(backing_of(segment));
    }
    return below_.latch_for_update(backing_segments, index, may_wait);
}

// --- Threads ------------------------------------------------------------------------------------------------------

void TierStore::look_ahead_when_kicked() {
    StallClock::ignore_this_thread();
    std::uint32_t seen = 0;
    while (!stopping_.load(std::memory_order_acquire)) {
        kicks_.wait(seen, std::memory_order_acquire);
        seen = kicks_.load(std::memory_order_acquire);
        if (!stopping_.load(std::memory_order_acquire)) client_->look_ahead();
    }
}

void TierStore::run(Lane& lane) {
    StallClock::ignore_this_thread();
    Transfers under_way;
    while (serve(lane, under_way)) {
    }
    lane.stream.reset();
}

/// Begins a copy, or ends the oldest. False when the lane has ended and nothing is under way.
bool TierStore::serve(Lane& lane, Transfers& under_way) noexcept {
    Transfers one = next(lane, under_way.empty());
    const bool is_idle = one.empty();
    if (!is_idle && begin(lane, one.front())) under_way.splice(under_way.end(), one);
    if (!under_way.empty() && (is_idle || under_way.size() == kCopiesUnderWay)) {
        finish(lane, under_way.front());
        under_way.pop_front();
        return true;
    }
    return !is_idle || !under_way.empty();
}

/// Nothing when the lane is empty; with `may_wait`, when it has ended.
TierStore::Transfers TierStore::next(Lane& lane, bool may_wait) noexcept {
    Transfers one;
    std::unique_lock lock(lane.mutex);
    if (may_wait) lane.changed.wait(lock, [&] { return lane.is_ending || !lane.waiting.empty(); });
    if (!lane.waiting.empty()) one.splice(one.begin(), lane.waiting, lane.waiting.begin());
    return one;
}

/// The backing segment's page is pinned and the copy queued; false if that failed, and was said so.
bool TierStore::begin(Lane& lane, Transfer& transfer) noexcept {
    Page& page = *transfer.page;
    const bool is_read = lane.direction == LinkDirection::to_device;
    try {
        if (!lane.stream) lane.stream = device_.make_stream(lane.direction);
        const std::shared_ptr<Segment> backing = backing_of(transfer.segment);
        transfer.below =
            pin_below(backing, transfer.segment->index_of(page), is_read ? Access::read : Access::overwrite);
        begin_copy(lane, transfer, below_.copied_range(*backing, transfer.segment->index_of(page)));
        return true;
    } catch (...) {
        end(lane, transfer, failed_end());
        return false;
    }
}

/// If this throws, no copy is under way that nobody can wait for.
void TierStore::begin_copy(Lane& lane, Transfer& transfer, std::span<std::byte> there) {
    const std::span<std::byte> here = transfer.page->frame.slot.first(there.size());
    transfer.begin_ns = activity_now_ns();
    try {
        if (lane.direction == LinkDirection::to_device) {
            lane.stream->copy(here, there);
        } else {
            lane.stream->copy(there, here);
        }
        transfer.copied = lane.stream->record();
    } catch (...) {
        lane.stream.reset();  // waits for what is queued
        throw;
    }
}

void TierStore::end(Lane& lane, const Transfer& transfer, const TransferEnd& end) noexcept {
    lane.in_flight.fetch_sub(1);
    if (lane.direction == LinkDirection::to_device) {
        client_->end_read(transfer.segment, *transfer.page, end);
    } else {
        client_->end_write(*transfer.page, end);
    }
}

/// Until the copy has passed nobody else has its memory, on either side.
void TierStore::finish(Lane& lane, Transfer& transfer) noexcept {
    try {
        wait_through_refusals(*transfer.copied);
    } catch (...) {
        end(lane, transfer, failed_end());
        return;
    }
    transfer.below = PinGuard();
    if (lane.direction == LinkDirection::to_device) note_read(transfer, activity_now_ns());
    end(lane, transfer, {TransferStatus::ok, nullptr, transfer.begin_ns});
    wake_planner();
}

PinGuard TierStore::pin_below(const std::shared_ptr<Segment>& backing, std::size_t index, Access access) {
    below_.touch(backing);
    return below_.pin_pages(backing, index, 1, access);
}

/// In the prediction below it has the role that the segment has above.
std::shared_ptr<Segment> TierStore::backing_of(const std::shared_ptr<Segment>& segment) {
    std::shared_ptr<Segment> backing = segment->backing();
    if (!backing) backing = make_backing(segment);
    const TraceId anchor = segment->anchor_id;  // a state may have become a parameter's
    if (backing->anchor_id != anchor) below_.set_anchor(*backing, anchor);
    return backing;
}

std::shared_ptr<Segment> TierStore::make_backing(const std::shared_ptr<Segment>& segment) {
    const std::size_t element_bytes = segment->page_bytes() / below_.options().page_elements;
    std::shared_ptr<Segment> made = below_.create_segment(segment->size_bytes(), element_bytes, segment->kind());
    made->stays = activations_stay_ && segment->kind() == SegmentKind::activation;
    made->assume({segment->kind(), segment->label, segment->trace_id, kNoTrace});
    {
        const std::lock_guard lock(making_);
        if (std::shared_ptr<Segment> known = segment->backing()) return known;
        segment->set_backing(made);
    }
    below_.touch(made);
    return made;
}

/// Time counts from when the copy was queued, or from the end of the one before it.
void TierStore::note_read(const Transfer& transfer, std::int64_t now_ns) {
    const std::int64_t since_ns = std::max(transfer.begin_ns, last_read_ns_);
    read_rate_.note(transfer.page->frame.slot.size(), std::chrono::nanoseconds(now_ns - since_ns));
    last_read_ns_ = now_ns;
}

}  // namespace torch_offload
