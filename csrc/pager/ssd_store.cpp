#include "pager/ssd_store.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/activity_log.h"
#include "base/check.h"
#include "base/engine_thread.h"
#include "base/log.h"
#include "base/units.h"
#include "pager/pager.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::chrono::milliseconds kIdleWait{200};
constexpr std::chrono::milliseconds kNoWait{0};
constexpr std::chrono::milliseconds kBrokenPause{10};
constexpr std::chrono::milliseconds kLongestTurn{500};  // of a thread that runs, by far
constexpr std::size_t kReapBatch = 32;
constexpr double kFirstReadRate = 1e9;  // bytes per second, until there is a measurement
constexpr double kJitter = 0.25;        // of a wait before a transfer is tried again, either way

/// Distinguishes the scratch files of one process, so that a page of one is never taken for a page of another.
std::uint64_t next_store_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

bool is_full(int error) noexcept { return error == ENOSPC || error == EDQUOT; }

}  // namespace

SsdStore::SsdStore(std::span<const std::string> directories, std::unique_ptr<IoEngine> engine, TransferLimits limits,
                   std::span<const ScratchLimits> scratch_limits)
    : file_(directories, scratch_limits),
      store_id_(next_store_id()),
      limits_(std::move(limits)),
      engine_(std::move(engine)),
      arbiter_(engine_->capacity()),
      read_rate_(kFirstReadRate) {}

SsdStore::~SsdStore() { stop(); }

void SsdStore::start(StoreClient& client) {
    client_ = &client;
    thread_ = engine_thread("to-ssd", [this] { run(); });
}

bool SsdStore::stop() {
    if (thread_.joinable()) {
        stopping_.store(true, std::memory_order_release);
        engine_->wake();
        thread_.join();
    }
    return in_flight() == 0;
}

void SsdStore::read(std::shared_ptr<Segment> segment, Page& page) {
    enqueue(IoDirection::read, std::move(segment), page);
}

void SsdStore::write(std::shared_ptr<Segment> segment, Page& page) {
    enqueue(IoDirection::write, std::move(segment), page);
}

bool SsdStore::set_home(const Page& page, HomePlace home) {
    stored_page(page).home = std::move(home);
    home_bytes_.fetch_add(page.segment->frame_bytes(page.segment->index_of(page)), std::memory_order_relaxed);
    return true;
}

/// Its bytes lie elsewhere now, or are lost.
void SsdStore::leave_home(StoredPage& stored, std::size_t size_bytes) noexcept {
    if (!stored.home) return;
    stored.home = {};
    home_bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
}

void SsdStore::forget(Segment& segment) noexcept {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        decltype(stored_)::node_type entry;  // outlives the lock: it may close a file
        const std::lock_guard lock(stored_mutex_);
        entry = stored_.extract(&segment.page(i));
        if (!entry) continue;
        if (entry.mapped().extent) file_.free(*entry.mapped().extent);
        if (entry.mapped().home) home_bytes_.fetch_sub(segment.frame_bytes(i), std::memory_order_relaxed);
    }
}

StoreStatus SsdStore::status() const noexcept {
    return {reads_in_flight(), engine_->capacity(), read_rate_.rate(), home_bytes_.load(std::memory_order_relaxed)};
}

StoreStatistics SsdStore::statistics() const {
    return {file_.allocated_bytes(),
            file_.size_bytes(),
            retried_reads_.get(),
            retried_writes_.get(),
            healed_mismatches_.get(),
            quarantined_bytes_.get(),
            home_bytes_.load(std::memory_order_relaxed),
            read_times_.counts(),
            engine_->name()};
}

std::vector<std::string> SsdStore::describe_transfers(std::size_t most) {
    if (auto lines = inquiry_.ask(most, [this] { engine_->wake(); })) return std::move(*lines);
    return {concat("ssd tier: its I/O thread does not answer; ", under_way())};
}

UpdateLatch SsdStore::latch_for_update(std::span<const std::shared_ptr<Segment>>, std::size_t, bool) {
    throw LogicError("an update cannot be applied on the SSD");
}

void SsdStore::enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page) {
    Transfers one;
    Transfer& transfer = one.emplace_back();  // nothing has changed if this fails
    transfer.self = one.begin();
    transfer.request.direction = direction;
    transfer.segment = std::move(segment);
    transfer.page = &page;
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    if (direction == IoDirection::read) reads_in_flight_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(queue_mutex_);
        queue_.splice(queue_.end(), one);
    }
    engine_->wake();
}

void SsdStore::kick() noexcept {
    if (!kicked_.exchange(true, std::memory_order_acq_rel)) engine_->wake();
}

// --- Its thread ---------------------------------------------------------------------------------------------------

/// Nothing that fails here ends the process.
void SsdStore::run() {
    StallClock::ignore_this_thread();
    while (true) {
        try {
            serve();
            return;
        } catch (const TierIoError& error) {
            serve_broken(error);
            return;
        } catch (const std::exception& error) {  // such as a lack of memory for a transfer's own needs
            OFFLOAD_LOG(error, "ssd tier: a turn of the I/O thread failed: ", error.what());
            end_all(error);
        }
    }
}

/// The engine failed as a whole, and with it every transfer, now and later: each ends as not now. Pages in memory stay
/// usable.
void SsdStore::serve_broken(const TierIoError& error) {
    OFFLOAD_LOG(error, "ssd tier: the I/O engine failed: ", error.what(), "; pages on SSD cannot be used any more");
    settle_arrived();
    while (!engine_->quiesce()) {
        OFFLOAD_LOG(error, "ssd tier: transfers are still under way, waiting for them");
        if (stopping_.load(std::memory_order_acquire)) return;
    }
    ready_reads_.splice(ready_reads_.end(), submitted_);
    while (true) {
        take_queue();
        end_all(error);
        answer_inquiry();
        if (stopping_.load(std::memory_order_acquire)) return;
        std::this_thread::sleep_for(kBrokenPause);
    }
}

/// Until it is stopped and nothing is in flight that may end soon.
void SsdStore::serve() {
    std::array<IoRequest*, kReapBatch> finished{};
    auto turn_start = last_look_ = Clock::now();
    settle_arrived();  // what a turn that failed has left
    while (true) {
        take_queue();
        submit_ready();
        if (stopping_.load(std::memory_order_acquire)) {
            settle_arrived();
            if (in_flight() == 0 || is_stuck()) return;
        } else if (kicked_.exchange(false, std::memory_order_acq_rel)) {
            give_back_registered();
            client_->look_ahead();
            take_queue();
            submit_ready();
        }
        const IoLoad load_before = load();
        const bool was_reading = reads_in_flight() > 0;
        const std::size_t count = engine_->reap(finished, arrived_.empty() ? longest_wait() : kNoWait);
        const ArrivedBytes arrived = take_finished(std::span(finished).first(count));
        take_queue();
        submit_ready();  // before what has come is verified: the disk goes on meanwhile
        const bool has_settled = settle_one();
        check_ages();
        answer_inquiry();
        const auto now = Clock::now();
        arbiter_.note(arrived.read + arrived.written, now - turn_start, load_before);
        if (was_reading) read_rate_.note(arrived.read, now - turn_start);  // whatever else the disk did meanwhile
        turn_start = now;
        if (has_settled) kicked_.store(true, std::memory_order_release);
    }
}

SsdStore::ArrivedBytes SsdStore::take_finished(std::span<IoRequest* const> finished) noexcept {
    ArrivedBytes bytes;
    const auto now = Clock::now();
    for (IoRequest* request : finished) {
        const bool is_read = request->direction == IoDirection::read;
        (is_read ? bytes.read : bytes.written) += request->size_bytes();
        const Transfer& transfer = *static_cast<Transfer*>(request->context);
        if (is_read && request->error == 0) read_times_.note(now - transfer.submitted);
        arrived_.splice(arrived_.end(), submitted_, transfer.self);
    }
    return bytes;
}

/// False if nothing has arrived.
bool SsdStore::settle_one() noexcept {
    if (arrived_.empty()) return false;
    Transfers one;
    one.splice(one.begin(), arrived_, arrived_.begin());
    if (one.front().request.direction == IoDirection::read) {
        settle_read(one);
    } else {
        settle_write(one);
    }
    return true;
}

void SsdStore::settle_arrived() noexcept {
    while (settle_one()) {
    }
}

void SsdStore::take_queue() noexcept {
    Transfers taken;
    {
        const std::lock_guard lock(queue_mutex_);
        taken.swap(queue_);
    }
    while (!taken.empty()) {
        Transfers& waiting = ready(taken.front().request.direction);
        waiting.splice(waiting.end(), taken, taken.begin());
    }
    take_due();
}

/// Of a store that stops, all are due: they get their last attempt.
void SsdStore::take_due() noexcept {
    const bool are_all_due = stopping_.load(std::memory_order_acquire);
    const auto now = Clock::now();
    for (auto next = delayed_.begin(); next != delayed_.end();) {
        const auto transfer = next++;
        if (!are_all_due && transfer->due > now) continue;
        Transfers& waiting = ready(transfer->request.direction);
        waiting.splice(waiting.begin(), delayed_, transfer);
    }
}

/// Until the next delayed transfer is due, if that is soon, or until one is offered again that the engine did not take.
std::chrono::milliseconds SsdStore::longest_wait() const {
    const bool is_refused = submitted_.empty() && !(ready_reads_.empty() && ready_writes_.empty());
    auto wait = is_refused ? kBrokenPause : kIdleWait;
    for (const Transfer& transfer : delayed_) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(transfer.due - Clock::now());
        wait = std::clamp(left, std::chrono::milliseconds(0), wait);
    }
    return wait;
}

void SsdStore::submit_ready() {
    while (const std::optional<IoDirection> direction = arbiter_.next(load())) {
        Transfers& waiting = ready(*direction);
        Transfer& transfer = waiting.front();
        if (transfer.request.context == nullptr && !prepare(transfer)) {
            waiting.pop_front();
            continue;
        }
        if (transfer.begin_ns == 0) transfer.begin_ns = activity_now_ns();
        if (transfer.submitted == Clock::time_point{}) transfer.submitted = Clock::now();
        IoRequest* request = &transfer.request;
        std::size_t taken = 0;
        try {
            taken = engine_->submit({&request, 1});
        } catch (const TierIoError&) {  // the engine is broken, and may have taken it
            submitted_.splice(submitted_.end(), waiting, waiting.begin());
            throw;
        }
        if (taken == 0) return;                                         // full: the rest waits for completions
        submitted_.splice(submitted_.end(), waiting, waiting.begin());  // until reaped; context leads back to it
    }
}

/// Of the transfers that the engine has, or was offered; nullptr: there is none.
const Transfer* SsdStore::oldest_begun() const {
    const Transfer* oldest = nullptr;
    const auto look_at = [&](const Transfer& transfer) {
        const bool has_begun = transfer.submitted != Clock::time_point{};
        if (has_begun && (!oldest || transfer.submitted < oldest->submitted)) oldest = &transfer;
    };
    std::ranges::for_each(submitted_, look_at);
    for (const Transfers* waiting : {&ready_reads_, &ready_writes_}) {
        if (!waiting->empty()) look_at(waiting->front());
    }
    return oldest;
}

/// Whether a transfer that has taken long is the disk's fault. Not where this thread has not run for a while, as in a
/// process that was stopped: what has ended meanwhile was not taken from the engine, or did not run either.
bool SsdStore::may_judge(Clock::time_point now) noexcept {
    if (now - last_look_ > kLongestTurn) judge_from_ = now + kLongestTurn;
    last_look_ = now;
    return now >= judge_from_;
}

/// Whether the disk does not answer. Nobody needs what is in flight when a store stops.
bool SsdStore::is_stuck() {
    const auto now = Clock::now();
    if (!may_judge(now)) return false;
    const auto is_old = [&](const Transfer& transfer) { return now - transfer.submitted >= limits_.warn_after; };
    const Transfer* const oldest = oldest_begun();
    if (!oldest || !is_old(*oldest) || !std::ranges::all_of(submitted_, is_old)) return false;
    OFFLOAD_LOG(error, "ssd tier: ", in_flight(),
                " transfers do not end: the engine ends without them, and what memory "
                "they use stays until the process ends");
    return true;
}

/// Names the oldest transfer if it takes long. If it is late, so are all others, and who waits for them is told: the
/// disk does not answer.
void SsdStore::check_ages() {
    const auto now = Clock::now();
    if (!may_judge(now)) return;
    const Transfer* const oldest = oldest_begun();
    if (!oldest || now - oldest->submitted < std::min(limits_.warn_after, limits_.timeout)) {
        last_warning_.reset();
        return;
    }
    if (!last_warning_ || now - *last_warning_ >= limits_.warn_every) {
        last_warning_ = now;
        OFFLOAD_LOG(warning, describe(*oldest, now), "; ", under_way(),
                    "; the disk may hang: see the kernel's log (dmesg)");
    }
    if (now - oldest->submitted < limits_.timeout) return;
    const auto error = exception_from([&] {
        return TierIoError(concat(describe(*oldest, now), "; ", under_way(),
                                  "; nothing is lost if the disk comes back: see the kernel's log (dmesg)"),
                           ETIMEDOUT);
    });
    const auto note_late = [&](Transfer& transfer) {
        if (std::exchange(transfer.is_late, true)) return;
        client_->note_late(*transfer.page, transfer.request.direction, error);
    };
    for (Transfers* late : {&submitted_, &ready_reads_, &ready_writes_}) std::ranges::for_each(*late, note_late);
}

IoLoad SsdStore::load() const noexcept { return {ready_reads_.size(), ready_writes_.size(), submitted_.size()}; }

/// Ends every transfer that the engine does not have.
void SsdStore::end_all(const std::exception& error) noexcept {
    Transfers left;
    for (Transfers* waiting : {&delayed_, &ready_reads_, &ready_writes_}) left.splice(left.end(), *waiting);
    const auto why = exception_from([&] { return TierIoError(concat("ssd tier: ", error.what()), EIO); });
    for (Transfer& transfer : left) end(transfer, {TransferStatus::not_now, why});
}

// --- Before and after a transfer ----------------------------------------------------------------------------------

/// The page's entry, which stays where it is.
StoredPage& SsdStore::stored_page(const Page& page) {
    const std::lock_guard lock(stored_mutex_);
    return stored_[&page];
}

PageIdentity SsdStore::identity_of(const Page& page, std::uint64_t version) const {
    return {store_id_, page.segment->id() << 24 | page.segment->index_of(page), version};
}

/// All of it has come. What is first read from a file that nobody has written to is as stored.
bool SsdStore::is_as_stored(Transfer& transfer) const noexcept {
    StoredPage& stored = *transfer.stored;
    if (transfer.home_read) transfer.home_read->put_in_place();
    const std::uint64_t checksum =
        page_checksum(transfer.page->frame.slot, identity_of(*transfer.page, stored.version));
    if (stored.checksum) return *stored.checksum == checksum;
    if (!stored.home || !stored.home.file->is_unchanged()) return false;
    stored.checksum = checksum;
    return true;
}

/// A new extent; on a full disk the one that the page has, whose bytes nobody reads any more.
Extent SsdStore::place_for(const Transfer& transfer) {
    try {
        return file_.allocate(transfer.page->frame.slot.size());
    } catch (const TierIoError& error) {
        if (!is_full(error.error_number()) || !transfer.stored->extent) throw;
        return *transfer.stored->extent;
    }
}

/// Gives a write its place and its checksum. Throws: TierIoError when the disk is full.
void SsdStore::prepare_write(Transfer& transfer) {
    if (!transfer.target) transfer.target = place_for(transfer);
    if (transfer.version != 0) return;
    transfer.version = ++transfer.stored->last_version;
    transfer.checksum = page_checksum(transfer.page->frame.slot, identity_of(*transfer.page, transfer.version));
}

void SsdStore::register_frame(Frame& frame) noexcept {
    const std::size_t size_bytes = frame.slot.size();
    if (frame.fixed_index != kUnregistered || !client_->begin_registration(size_bytes)) return;
    try {
        frame.fixed_index = engine_->register_buffer(frame.slot);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(warning, "a buffer is not registered with the I/O engine: ", error.what());
    }
    client_->end_registration(size_bytes, frame.fixed_index != kUnregistered);
}

/// Fills the request; false if that failed: the transfer has ended.
bool SsdStore::prepare(Transfer& transfer) noexcept {
    Page& page = *transfer.page;
    IoRequest& request = transfer.request;
    const bool is_write = request.direction == IoDirection::write;
    try {
        transfer.stored = &stored_page(page);
        if (is_write) prepare_write(transfer);
        if (!is_write && transfer.stored->home && !transfer.home_read) {
            const std::size_t index = transfer.segment->index_of(page);
            const std::size_t page_bytes = transfer.segment->page_range(index).size();
            transfer.home_read.emplace(transfer.stored->home, page_bytes, page.frame.slot);
        }
    } catch (const std::exception& error) {
        const auto* const of_disk = dynamic_cast<const TierIoError*>(&error);
        const int number = of_disk ? of_disk->error_number() : ENOMEM;
        end(transfer, {TransferStatus::not_now,
                       is_write ? write_error(transfer, error.what(), number) : read_error(transfer, number)});
        return false;
    }
    if (transfer.home_read) {
        transfer.home_read->fill(request);
    } else {
        const Extent& extent = is_write ? *transfer.target : *transfer.stored->extent;
        request.file_descriptor = file_.file_descriptor(extent);
        request.offset_bytes = extent.offset_bytes;
        request.buffer = page.frame.slot;
    }
    if (request.tail.empty()) {  // what is in two pieces cannot use registered memory
        register_frame(page.frame);
        request.fixed_index = page.frame.fixed_index;
        request.fixed_address = page.frame.slot.data();
    }
    request.context = &transfer;
    return true;
}

/// Puts a transfer off that failed for a reason that may pass. False, and still the caller's, once it was tried as
/// often as is worth it, or the store stops.
bool SsdStore::try_again_later(Transfers& one) noexcept {
    Transfer& transfer = one.front();
    const IoRequest& request = transfer.request;
    const bool is_worth_it = may_pass(request.error) && transfer.failed_attempts < limits_.retry_delays.size();
    if (!is_worth_it || stopping_.load(std::memory_order_acquire)) return false;
    const IoDirection direction = request.direction;
    const bool is_read = direction == IoDirection::read;
    (is_read ? retried_reads_ : retried_writes_).increment();
    const auto delay = limits_.retry_delays[transfer.failed_attempts++];
    OFFLOAD_LOG(warning, "ssd tier: ", is_read ? "reading" : "writing", " page ",
                transfer.segment->index_of(*transfer.page), " of ", transfer.segment->label, " failed (",
                std::strerror(request.error), "), trying again in ", delay.count(), " ms");
    std::uniform_real_distribution<double> factor(1 - kJitter, 1 + kJitter);
    transfer.due = Clock::now() + std::chrono::duration_cast<Clock::duration>(delay * factor(jitter_));
    give_up_target(transfer);  // a write is tried again elsewhere
    transfer.submitted = {};
    transfer.request = IoRequest{};
    transfer.request.direction = direction;
    delayed_.splice(delayed_.end(), one);
    return true;
}

/// Where the write failed is not used again, unless there is no memory to remember it.
void SsdStore::give_up_target(Transfer& transfer) noexcept {
    if (transfer.target && transfer.target != transfer.stored->extent) {
        try {
            transfer.refused.push_back(*transfer.target);
        } catch (const std::bad_alloc&) {
            file_.free(*transfer.target);
        }
    }
    transfer.target.reset();
}

void SsdStore::end(Transfer& transfer, const TransferEnd& end) noexcept {
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    if (transfer.request.direction == IoDirection::read) {
        reads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
        client_->end_read(transfer.segment, *transfer.page, end);
        return;
    }
    if (end.status != TransferStatus::ok) {
        for (const Extent& extent : transfer.refused) file_.free(extent);  // all of the disk fails, as it seems
        if (transfer.target && transfer.target != transfer.stored->extent) file_.free(*transfer.target);
    }
    client_->end_write(*transfer.page, end);
}

/// Where it failed is not used again if it succeeded elsewhere.
void SsdStore::settle_write(Transfers& one) noexcept {
    Transfer& transfer = one.front();
    StoredPage& stored = *transfer.stored;
    if (const int error = transfer.request.error; error != 0) {
        if (try_again_later(one)) return;
        end(transfer, {TransferStatus::not_now, write_error(transfer, std::strerror(error), error)});
        return;
    }
    if (stored.extent && stored.extent != transfer.target) file_.free(*stored.extent);
    stored.extent = transfer.target;
    leave_home(stored, transfer.page->frame.slot.size());
    stored.version = transfer.version;
    stored.checksum = transfer.checksum;
    for (const Extent& extent : transfer.refused) quarantined_bytes_.add(extent.size_bytes);
    end(transfer, {TransferStatus::ok, nullptr, transfer.begin_ns});
}

/// A read, before all others.
void SsdStore::submit_again(Transfers& one) noexcept {
    one.front().submitted = {};
    one.front().request = IoRequest{};
    ready_reads_.splice(ready_reads_.begin(), one);
}

void SsdStore::settle_read(Transfers& one) noexcept {
    Transfer& transfer = one.front();
    StoredPage& stored = *transfer.stored;
    const int error = transfer.request.error;
    if (error != 0) {
        if (try_again_later(one)) return;
        end(transfer, {TransferStatus::not_now, read_error(transfer, error)});
    } else if (is_as_stored(transfer)) {
        if (transfer.is_second_read) healed_mismatches_.increment();
        end(transfer, {TransferStatus::ok, nullptr, transfer.begin_ns});
    } else if (!transfer.is_second_read) {
        OFFLOAD_LOG(warning, "checksum mismatch at offset ", transfer.request.offset_bytes, ", reading again");
        transfer.is_second_read = true;
        submit_again(one);
    } else {
        const std::exception_ptr why = corruption_error(transfer);
        if (stored.extent) quarantined_bytes_.add(stored.extent->size_bytes);
        stored.extent.reset();
        leave_home(stored, transfer.page->frame.slot.size());
        end(transfer, {TransferStatus::lost, why});
    }
}

void SsdStore::give_back_registered() noexcept {
    std::vector<Frame> frames;
    try {
        frames = client_->frames_to_unregister();
    } catch (const std::bad_alloc&) {
        kicked_.store(true, std::memory_order_release);  // who waits for them waits on
    }
    for (const Frame& frame : frames) {
        try {
            engine_->unregister_buffer(frame.fixed_index);
        } catch (const std::exception& error) {
            OFFLOAD_LOG(warning, "memory stays registered with the I/O engine: ", error.what());
        }
        client_->take_unregistered(Frame{frame.slot});
    }
}

}  // namespace torch_offload
