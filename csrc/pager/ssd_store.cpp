#include "pager/ssd_store.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/activity_log.h"
#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "pager/pager.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::chrono::milliseconds kIdleWait{200};
constexpr std::size_t kReapBatch = 32;

constexpr double kFirstReadRate = 1e9;  // bytes per second, until there is a measurement

/// Distinguishes the scratch files of one process, so that a page of one is never taken for a page of another.
std::uint64_t next_store_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

}  // namespace

SsdStore::SsdStore(std::span<const std::string> directories, std::unique_ptr<IoEngine> engine)
    : file_(directories),
      store_id_(next_store_id()),
      engine_(std::move(engine)),
      arbiter_(engine_->capacity()),
      read_rate_(kFirstReadRate) {}

SsdStore::~SsdStore() { stop(); }

void SsdStore::start(StoreClient& client) {
    client_ = &client;
    thread_ = std::thread([this] { run(); });
}

void SsdStore::stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    engine_->wake();
    thread_.join();
}

void SsdStore::read(std::shared_ptr<Segment> segment, Page& page) {
    reads_in_flight_.fetch_add(1, std::memory_order_relaxed);
    enqueue(IoDirection::read, std::move(segment), page);
}

void SsdStore::write(std::shared_ptr<Segment> segment, Page& page) {
    enqueue(IoDirection::write, std::move(segment), page);
}

void SsdStore::forget(Segment& segment) noexcept {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        if (const Page& page = segment.page(i); page.extent) file_.free(*page.extent);
    }
}

StoreStatistics SsdStore::statistics() const { return {file_.allocated_bytes(), file_.size_bytes(), engine_->name()}; }

UpdateLatch SsdStore::latch_for_update(std::span<const std::shared_ptr<Segment>>, std::size_t, bool) {
    throw LogicError("an update cannot be applied on the SSD");
}

void SsdStore::enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page) {
    auto transfer = std::make_unique<Transfer>();
    transfer->request.direction = direction;
    transfer->segment = std::move(segment);
    transfer->page = &page;
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(queue_mutex_);
        queue_.push_back(std::move(transfer));
    }
    engine_->wake();
}

void SsdStore::kick() noexcept {
    if (!kicked_.exchange(true, std::memory_order_acq_rel)) engine_->wake();
}

void SsdStore::run() {
    StallClock::ignore_this_thread();
    std::array<IoRequest*, kReapBatch> finished{};
    auto turn_start = std::chrono::steady_clock::now();
    while (true) {
        take_queue();
        submit_ready();
        if (stopping_.load(std::memory_order_acquire)) {
            if (in_flight() == 0) return;
        } else if (kicked_.exchange(false, std::memory_order_acq_rel)) {
            give_back_registered();
            client_->look_ahead();
            take_queue();
            submit_ready();
        }
        const IoLoad load_before = load();
        const bool was_reading = reads_in_flight() > 0;
        const std::size_t count = engine_->reap(finished, kIdleWait);
        submitted_ -= count;
        std::size_t read_bytes = 0;
        std::size_t finished_bytes = 0;
        for (std::size_t i = 0; i < count; ++i) {
            std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(finished[i]->context));
            finished_bytes += transfer->request.buffer.size();
            if (transfer->request.direction == IoDirection::read) read_bytes += transfer->request.buffer.size();
            settle_finished(std::move(transfer));
        }
        const auto now = std::chrono::steady_clock::now();
        arbiter_.note(finished_bytes, now - turn_start, load_before);
        if (was_reading) read_rate_.note(read_bytes, now - turn_start);  // whatever else the disk did meanwhile
        turn_start = now;
        if (count > 0) kicked_.store(true, std::memory_order_release);
    }
}

void SsdStore::take_queue() {
    std::vector<std::unique_ptr<Transfer>> taken;
    {
        const std::lock_guard lock(queue_mutex_);
        taken.swap(queue_);
    }
    for (std::unique_ptr<Transfer>& transfer : taken) {
        const bool is_read = transfer->request.direction == IoDirection::read;
        (is_read ? ready_reads_ : ready_writes_).push_back(std::move(transfer));
    }
}

void SsdStore::submit_ready() {
    while (const std::optional<IoDirection> direction = arbiter_.next(load())) {
        auto& ready = *direction == IoDirection::read ? ready_reads_ : ready_writes_;
        Transfer& transfer = *ready.front();
        if (transfer.request.context == nullptr && !prepare(transfer)) {
            ready.pop_front();
            in_flight_.fetch_sub(1, std::memory_order_relaxed);
            continue;
        }
        if (transfer.begin_ns == 0) transfer.begin_ns = activity_now_ns();
        IoRequest* request = &transfer.request;
        if (engine_->submit({&request, 1}) == 0) return;  // full: the rest waits for completions
        static_cast<void>(ready.front().release());       // the engine's until reaped; context leads back to it
        ready.pop_front();
        ++submitted_;
    }
}

IoLoad SsdStore::load() const noexcept { return {ready_reads_.size(), ready_writes_.size(), submitted_}; }

PageIdentity SsdStore::identity_of(const Page& page) const {
    return {store_id_, page.segment->id() << 24 | page.segment->index_of(page), page.version};
}

/// Gives the page an extent and the checksum of its frame; throws TierIoError when the disk is full.
void SsdStore::prepare_write(Page& page) {
    if (!page.extent) page.extent = file_.allocate(page.frame.slot.size());
    ++page.version;
    page.checksum = page_checksum(page.frame.slot, identity_of(page));
}

bool SsdStore::frame_matches(const Page& page) const {
    return page_checksum(page.frame.slot, identity_of(page)) == page.checksum;
}

/// `error_number` 0: the bytes came, and are not the ones that were written.
std::exception_ptr SsdStore::read_error(const Page& page, int error_number) const {
    const std::string message =
        concat("ssd tier: reading page ", page.segment->index_of(page), " of ", page.segment->label, " at offset ",
               page.extent->offset_bytes, " of the scratch file in ", file_.directory(*page.extent),
               " failed: ", error_number == 0 ? "checksum mismatch" : std::strerror(error_number),
               "; the page is lost, restart from the last checkpoint on a sound disk");
    if (error_number == 0) return std::make_exception_ptr(CorruptPage(message));
    return std::make_exception_ptr(TierIoError(message, error_number));
}

std::exception_ptr SsdStore::write_error(const Page& page, const std::string& why, int error_number) const {
    return std::make_exception_ptr(TierIoError(
        concat("ssd tier: writing page ", page.segment->index_of(page), " of ", page.segment->label,
               page.extent ? concat(" to the scratch file in ", file_.directory(*page.extent)) : std::string(),
               " failed: ", why),
        error_number));
}

/// Fills the request; false if the transfer ended in an error that was already reported.
bool SsdStore::prepare(Transfer& transfer) {
    Page& page = *transfer.page;
    IoRequest& request = transfer.request;
    if (page.frame.fixed_index == kUnregistered && client_->may_register(page.frame.slot.size())) {
        page.frame.fixed_index = engine_->register_buffer(page.frame.slot);
        if (page.frame.fixed_index != kUnregistered) client_->note_registered(page.frame.slot.size());
    }
    if (request.direction == IoDirection::write) {
        try {
            prepare_write(page);
        } catch (const TierIoError& error) {
            client_->fail_write(page, write_error(page, error.what(), error.error_number()));
            return false;
        }
    }
    request.file_descriptor = file_.file_descriptor(*page.extent);
    request.offset_bytes = page.extent->offset_bytes;
    request.buffer = page.frame.slot;
    request.fixed_index = page.frame.fixed_index;
    request.fixed_address = page.frame.slot.data();
    request.context = &transfer;
    return true;
}

void SsdStore::settle_finished(std::unique_ptr<Transfer> transfer) {
    if (transfer->request.direction == IoDirection::read) {
        settle_read(std::move(transfer));
        return;
    }
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    const int error = transfer->request.error;
    if (error == 0) {
        client_->note_transfer(*transfer->page, IoDirection::write, transfer->begin_ns);
        client_->finish_write(*transfer->page);
    } else {
        client_->fail_write(*transfer->page, write_error(*transfer->page, std::strerror(error), error));
    }
}

void SsdStore::settle_read(std::unique_ptr<Transfer> transfer) {
    Page& page = *transfer->page;
    const int error = transfer->request.error;
    if (error == 0 && !frame_matches(page) && !transfer->is_second_read) {
        OFFLOAD_LOG(warning, "checksum mismatch at offset ", transfer->request.offset_bytes, ", reading again");
        transfer->is_second_read = true;
        transfer->request = IoRequest{};
        ready_reads_.push_front(std::move(transfer));
        return;
    }
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    reads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
    if (error != 0 || (transfer->is_second_read && !frame_matches(page))) {
        client_->fail_read(page, read_error(page, error));
    } else {
        client_->note_transfer(page, IoDirection::read, transfer->begin_ns);
        client_->finish_read(transfer->segment, page);
    }
}

void SsdStore::give_back_registered() {
    for (const Frame& frame : client_->frames_to_unregister()) {
        engine_->unregister_buffer(frame.fixed_index);
        client_->take_unregistered(Frame{frame.slot});
    }
}

}  // namespace torch_offload
