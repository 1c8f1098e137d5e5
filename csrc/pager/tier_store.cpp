#include "pager/tier_store.h"

#include <optional>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::size_t kCopiesUnderWay = 4;  // per direction: one that is copied, one that waits, their neighbours
constexpr std::size_t kCapacity = 16;

// What the lanes pin at once, and as much to come and go.
constexpr std::size_t kLeastPagesBelow = 2 * kLinkDirectionCount * kCopiesUnderWay;
constexpr std::size_t kWidestElementBytes = 4;
constexpr double kFirstReadRate = 4e9;             // bytes per second, until there is a measurement
constexpr std::size_t kMeasuredBytes = 64 * kMiB;  // a measurement spans so many
constexpr double kWeightOfLast = 0.5;              // of a new measurement in the running mean

}  // namespace

TierStore::TierStore(Pager& below, Device& device) : below_(below), device_(device), read_rate_(kFirstReadRate) {
    const std::size_t least_bytes = kLeastPagesBelow * below.options().page_elements * kWidestElementBytes;
    OFFLOAD_CHECK(below.options().budget_bytes >= least_bytes, InvalidArgument, "host memory tier: a budget of ",
                  below.options().budget_bytes, " bytes is too small to feed a device, which takes ", least_bytes,
                  "; raise `ram`, or lower the page size");
}

TierStore::~TierStore() { stop(); }

void TierStore::start(StoreClient& client) {
    client_ = &client;
    for (Lane* lane : {&to_device_, &to_host_}) lane->thread = std::thread([this, lane] { run(*lane); });
    planner_ = std::thread([this] { look_ahead_when_kicked(); });
}

void TierStore::stop() {
    if (!planner_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    kick();
    planner_.join();  // first: it makes transfers
    for (Lane* lane : {&to_device_, &to_host_}) {
        {
            const std::lock_guard lock(lane->mutex);
            lane->is_ending = true;
        }
        lane->changed.notify_one();
        lane->thread.join();
    }
}

void TierStore::read(std::shared_ptr<Segment> segment, Page& page) { enqueue(to_device_, std::move(segment), page); }

void TierStore::write(std::shared_ptr<Segment> segment, Page& page) { enqueue(to_host_, std::move(segment), page); }

void TierStore::enqueue(Lane& lane, std::shared_ptr<Segment> segment, Page& page) {
    lane.in_flight.fetch_add(1);
    {
        const std::lock_guard lock(lane.mutex);
        lane.waiting.push_back({std::move(segment), &page, PinGuard(), nullptr});
    }
    lane.changed.notify_one();
}

void TierStore::evict(Segment& segment) {
    std::shared_ptr<Segment> counterpart;
    {
        const std::lock_guard lock(mutex_);
        if (const auto found = counterparts_.find(&segment); found != counterparts_.end()) counterpart = found->second;
    }
    if (counterpart) below_.evict(counterpart);
}

void TierStore::forget(Segment& segment) noexcept {
    std::shared_ptr<Segment> counterpart;  // outlives the lock: its end is the pager's below
    const std::lock_guard lock(mutex_);
    const auto found = counterparts_.find(&segment);
    if (found == counterparts_.end()) return;
    counterpart = std::move(found->second);
    counterparts_.erase(found);
}

void TierStore::kick() noexcept {
    kicks_.fetch_add(1, std::memory_order_acq_rel);
    kicks_.notify_one();
}

std::size_t TierStore::capacity() const noexcept { return kCapacity; }

StoreStatistics TierStore::statistics() const {
    StoreStatistics statistics;
    statistics.engine = device_.name();
    return statistics;
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
    const std::unique_ptr<Stream> stream = device_.make_stream(lane.direction);
    std::deque<Transfer> under_way;
    while (true) {
        std::optional<Transfer> transfer = next(lane, under_way.empty());
        if (transfer && begin(lane, *stream, *transfer)) under_way.push_back(std::move(*transfer));
        if (!under_way.empty() && (!transfer || under_way.size() == kCopiesUnderWay)) {
            Transfer oldest = std::move(under_way.front());
            under_way.pop_front();
            finish(lane, std::move(oldest));
        } else if (!transfer && under_way.empty()) {
            return;
        }
    }
}

/// Nothing when the lane is empty; with `may_wait`, when it has ended.
std::optional<TierStore::Transfer> TierStore::next(Lane& lane, bool may_wait) {
    std::unique_lock lock(lane.mutex);
    if (may_wait) lane.changed.wait(lock, [&] { return lane.is_ending || !lane.waiting.empty(); });
    if (lane.waiting.empty()) return std::nullopt;
    std::optional<Transfer> transfer = std::move(lane.waiting.front());
    lane.waiting.pop_front();
    return transfer;
}

/// The counterpart's page is pinned and the copy queued; false if that failed, and was said so.
bool TierStore::begin(Lane& lane, Stream& stream, Transfer& transfer) {
    Page& page = *transfer.page;
    const bool is_read = lane.direction == LinkDirection::to_device;
    try {
        const std::shared_ptr<Segment> counterpart = counterpart_of(*transfer.segment);
        const std::size_t index = transfer.segment->index_of(page);
        transfer.below = pin_below(counterpart, index, is_read ? Access::read : Access::overwrite);
        const std::span<std::byte> there = counterpart->page_range(index);
        const std::span<std::byte> here = page.frame.slot.first(there.size());
        if (is_read) {
            stream.copy(here, there);
        } else {
            stream.copy(there, here);
        }
        transfer.copied = stream.record();
        return true;
    } catch (...) {
        fail(lane, page);
        return false;
    }
}

/// Says the exception that is being handled.
void TierStore::fail(Lane& lane, Page& page) {
    lane.in_flight.fetch_sub(1);
    if (lane.direction == LinkDirection::to_device) {
        client_->fail_read(page, std::current_exception());
    } else {
        client_->fail_write(page, std::current_exception());
    }
}

void TierStore::finish(Lane& lane, Transfer transfer) {
    Page& page = *transfer.page;
    try {
        transfer.copied->wait();
    } catch (...) {
        fail(lane, page);
        return;
    }
    transfer.below = PinGuard();
    lane.in_flight.fetch_sub(1);
    if (lane.direction == LinkDirection::to_device) {
        note_read(page.frame.slot.size());
        client_->finish_read(transfer.segment, page);
    } else {
        client_->finish_write(page);
    }
    kick();
}

/// What the pager below raises may be an earlier failure of another page, which it raises once.
PinGuard TierStore::pin_below(const std::shared_ptr<Segment>& counterpart, std::size_t index, Access access) {
    below_.touch(counterpart);
    try {
        return below_.pin_pages(counterpart, index, 1, access);
    } catch (const OffloadError&) {
        client_->note_error(std::current_exception());
    }
    return below_.pin_pages(counterpart, index, 1, access);
}

/// Made by the first page that leaves; in the trace below it has the role that it has above.
std::shared_ptr<Segment> TierStore::counterpart_of(Segment& segment) {
    {
        const std::lock_guard lock(mutex_);
        if (const auto found = counterparts_.find(&segment); found != counterparts_.end()) return found->second;
    }
    const std::size_t element_bytes = segment.page_bytes() / below_.options().page_elements;
    std::shared_ptr<Segment> made = below_.create_segment(segment.size_bytes(), element_bytes, segment.kind());
    made->label = segment.label;
    const std::lock_guard lock(mutex_);
    if (segment.trace_id != kNoTrace) {
        for (; traced_ <= segment.trace_id; ++traced_) below_.new_trace_id();
        made->trace_id = segment.trace_id;
    }
    return counterparts_.emplace(&segment, std::move(made)).first->second;
}

void TierStore::note_read(std::size_t size_bytes) {
    const auto now = std::chrono::steady_clock::now();
    if (measured_bytes_ == 0) measured_since_ = now;
    measured_bytes_ += size_bytes;
    if (reads_in_flight() > 0 && measured_bytes_ < kMeasuredBytes) return;
    const double seconds = std::chrono::duration<double>(now - measured_since_).count();
    if (measured_bytes_ >= kMeasuredBytes / 4 && seconds > 0) {
        const double rate = static_cast<double>(measured_bytes_) / seconds;
        read_rate_.store(kWeightOfLast * rate + (1 - kWeightOfLast) * read_rate(), std::memory_order_relaxed);
    }
    measured_bytes_ = 0;
}

}  // namespace torch_offload
