#include "pager/remote_store.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "base/activity_log.h"
#include "base/check.h"
#include "base/engine_thread.h"
#include "base/log.h"
#include "pager/pager.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

constexpr std::chrono::milliseconds kGreetingLimit{5'000};  // to connect, and again to be welcomed
constexpr std::chrono::milliseconds kLongestTurn{500};      // of a thread that runs, by far
constexpr int kIdleMilliseconds = 200;
constexpr std::size_t kMaxOfOneKind = kMaxRequests / 3;  // reads, writes, updates
constexpr double kFirstReadRate = 1e9;                   // bytes per second, until there is a measurement

FileDescriptor connection_to(const NetAddress& address) {
    try {
        return connect_to(address, kGreetingLimit);
    } catch (const TierIoError& error) {
        throw TierIoError(concat("store ", error.what(), "; start one there: torch-offload store --listen ",
                                 address.text(), " --ram SIZE --ssd DIR"),
                          error.error_number());
    }
}

}  // namespace

RemoteStore::RemoteStore(const NetAddress& address, std::size_t page_bytes, std::size_t queue_depth,
                         TransferLimits limits, const std::string& kernels)
    : name_(concat("store ", address.text())),
      capacity_(std::min(queue_depth, kMaxOfOneKind)),
      limits_(std::move(limits)),
      channel_(connection_to(address), name_),
      requests_(2 * capacity_),
      update_requests_(capacity_),
      read_rate_(kFirstReadRate) {
    greet(page_bytes, kernels);
}

RemoteStore::~RemoteStore() { stop(); }

/// Throws: TierIoError unless the store says welcome.
void RemoteStore::greet(std::size_t page_bytes, const std::string& kernels) {
    MessageHeader hello;
    hello.kind = MessageKind::hello;
    hello.page_bytes = page_bytes;
    channel_.send(hello, std::as_bytes(std::span(kernels)));
    const auto deadline = Clock::now() + kGreetingLimit;
    Channel::Arrival arrival = Channel::Arrival::nothing;
    while (arrival != Channel::Arrival::message) {
        channel_.flush();
        arrival = channel_.receive();
        if (arrival == Channel::Arrival::header) place_body();
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        if (left.count() <= 0) throw TierIoError(concat(name_, " is there and does not answer"), ETIMEDOUT);
        if (arrival == Channel::Arrival::nothing) channel_.wait(-1, static_cast<int>(left.count()));
    }
    const MessageHeader& answer = channel_.header();
    const std::string_view text(text_.data(), answer.body_bytes);
    if (answer.kind == MessageKind::refused) throw TierIoError(concat(name_, " refuses: ", text), EPROTO);
    if (answer.kind != MessageKind::welcome) break_off("it does not say welcome");
    client_id_ = answer.client;
    identity_ = answer.version;
    budget_bytes_ = answer.segment_bytes;
    max_update_bytes_ = kernels.empty() ? 0 : answer.page_bytes;
    if (kernels.empty() || max_update_bytes_ > 0) return;
    OFFLOAD_LOG(warning, name_, " runs no updates, so optimizer states cross the network: ", text);
}

void RemoteStore::start(StoreClient& client) {
    client_ = &client;
    thread_ = engine_thread("to-store", [this] { run(); });
}

/// True: a store that is silent is hung up on, and then nobody uses the frames any more.
bool RemoteStore::stop() {
    if (thread_.joinable()) {
        stopping_.store(true, std::memory_order_release);
        wake_.raise();
        thread_.join();
    }
    return true;
}

void RemoteStore::read(std::shared_ptr<Segment> segment, Page& page) {
    enqueue(IoDirection::read, std::move(segment), page);
}

void RemoteStore::write(std::shared_ptr<Segment> segment, Page& page) {
    enqueue(IoDirection::write, std::move(segment), page);
}

void RemoteStore::enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page) {
    const std::size_t size_bytes = segment->page_range(segment->index_of(page)).size();
    Transfers one;
    Transfer& transfer = one.emplace_back();  // nothing has changed if this fails
    transfer.direction = direction;
    transfer.segment = std::move(segment);
    transfer.page = &page;
    transfer.bytes = page.frame.slot.first(size_bytes);
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    if (direction == IoDirection::read) reads_in_flight_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(queue_mutex_);
        queue_.splice(queue_.end(), one);
    }
    wake_.raise();
}

void RemoteStore::forget(Segment& segment) noexcept {
    {
        const std::lock_guard lock(stored_mutex_);
        const auto found = segment_by_id_.find(segment.id());
        if (found == segment_by_id_.end()) return;
        stored_bytes_.fetch_sub(found->second->stored_bytes, std::memory_order_relaxed);
        forgotten_.splice(forgotten_.end(), segments_, found->second);
        segment_by_id_.erase(found);
    }
    wake_.raise();
}

void RemoteStore::kick() noexcept {
    if (!kicked_.exchange(true, std::memory_order_acq_rel)) wake_.raise();
}

void RemoteStore::begin_pass(ProgramId program) { enqueue_pass(MessageKind::pass, program); }

void RemoteStore::end_step() { enqueue_pass(MessageKind::step, 0); }

/// Goes with what is sent next.
void RemoteStore::enqueue_pass(MessageKind kind, ProgramId program) {
    Passes one;
    MessageHeader& header = one.emplace_back();
    header.kind = kind;
    header.count = program;
    const std::lock_guard lock(queue_mutex_);
    queued_passes_.splice(queued_passes_.end(), one);
}

StoreStatus RemoteStore::status() const noexcept {
    return {reads_in_flight_.load(std::memory_order_relaxed), capacity_, read_rate_.rate()};
}

StoreStatistics RemoteStore::statistics() const {
    StoreStatistics statistics;
    statistics.stored_bytes = stored_bytes_.load(std::memory_order_relaxed);
    statistics.retried_reads = retried_reads_.get();
    statistics.retried_writes = retried_writes_.get();
    statistics.healed_mismatches = healed_mismatches_.get();
    statistics.engine = name_;
    return statistics;
}

/// Which they are is known to its thread.
std::vector<std::string> RemoteStore::describe_transfers(std::size_t) {
    const std::size_t reads = reads_in_flight_.load(std::memory_order_relaxed);
    const std::size_t all = std::max(in_flight(), reads);
    if (all == 0) return {};
    return {concat(name_, ": ", reads, " reads and ", all - reads, " writes are under way")};
}

UpdateLatch RemoteStore::latch_for_update(std::span<const std::shared_ptr<Segment>>, std::size_t, bool) {
    throw LogicError("an update cannot be applied in another process");
}

// --- Its thread ---------------------------------------------------------------------------------------------------

/// Nothing that fails here ends the process.
void RemoteStore::run() {
    StallClock::ignore_this_thread();
    try {
        serve();
    } catch (const TierIoError& error) {
        serve_broken(error);
    } catch (const std::exception& error) {  // such as a lack of memory for a transfer's own needs
        serve_broken(TierIoError(concat(name_, ": the connection was ended: ", error.what()), ECONNABORTED));
    }
}

/// Until it is stopped and nothing is in flight. Throws: TierIoError when the connection has ended.
void RemoteStore::serve() {
    last_move_ = last_turn_ = Clock::now();
    while (true) {
        take_queue();
        send_ready();
        if (stopping_.load(std::memory_order_acquire)) {
            if (in_flight() == 0) return;
        } else if (kicked_.exchange(false, std::memory_order_acq_rel)) {
            client_->look_ahead();
            take_queue();
            send_ready();
        }
        const bool was_reading = reads_in_flight_.load(std::memory_order_relaxed) > 0;
        const std::uint64_t received_before = channel_.received_bytes();
        const auto turn_start = Clock::now();
        channel_.wait(wake_.file_descriptor(), kIdleMilliseconds);
        wake_.clear();
        receive_arrived();
        if (was_reading) read_rate_.note(channel_.received_bytes() - received_before, Clock::now() - turn_start);
        check_silence();
    }
}

/// What the store had is gone, now and later. Pages in memory stay usable.
void RemoteStore::serve_broken(const TierIoError& error) {
    OFFLOAD_LOG(error, error.what(), "; pages that were there cannot be used any more");
    channel_.close();
    while (true) {
        take_queue();
        end_all(error);
        if (stopping_.load(std::memory_order_acquire)) return;
        channel_.wait(wake_.file_descriptor(), kIdleMilliseconds);
        wake_.clear();
    }
}

void RemoteStore::take_queue() noexcept {
    Transfers taken;
    {
        const std::lock_guard lock(queue_mutex_);
        taken.swap(queue_);
        waiting_updates_.splice(waiting_updates_.end(), queued_updates_);
        waiting_passes_.splice(waiting_passes_.end(), queued_passes_);
    }
    while (!taken.empty()) {
        Transfers& waiting = taken.front().direction == IoDirection::read ? waiting_reads_ : waiting_writes_;
        waiting.splice(waiting.end(), taken, taken.begin());
    }
}

/// Names the store if it is silent for long. After the timeout who waits for it is told, once for each transfer. Not
/// where this thread has not run for a while, as in a process that was stopped.
void RemoteStore::check_silence() {
    const auto now = Clock::now();
    const bool has_slept = now - last_turn_ > kLongestTurn;
    last_turn_ = now;
    if (has_slept || in_flight() == 0) last_move_ = now;
    const auto silence = now - last_move_;
    if (silence < std::min(limits_.warn_after, limits_.timeout)) {
        last_warning_.reset();
        return;
    }
    const auto error = [&] {
        return TierIoError(
            concat(name_, ": nothing has come for ", std::chrono::duration<double>(silence).count(), " s, and ",
                   in_flight(), " transfers are under way; nothing is lost if it comes back"),
            ETIMEDOUT);
    };
    if (stopping_.load(std::memory_order_acquire) || ends_work_.load(std::memory_order_acquire)) throw error();
    if (!last_warning_ || now - *last_warning_ >= limits_.warn_every) {
        last_warning_ = now;
        OFFLOAD_LOG(warning, error().what());
    }
    if (silence < limits_.timeout) return;
    const std::exception_ptr late = exception_from(error);
    const auto note_late = [&](Transfer& transfer) {
        if (!std::exchange(transfer.is_late, true)) client_->note_late(*transfer.page, transfer.direction, late);
    };
    for (Request& request : requests_) std::ranges::for_each(request.transfer, note_late);
    for (Transfers* waiting : {&waiting_reads_, &waiting_writes_}) std::ranges::for_each(*waiting, note_late);
    const auto note_update_late = [&](Update& update) {
        if (!std::exchange(update.is_late, true)) update.work.note_late(late);
    };
    for (Updates& request : update_requests_) std::ranges::for_each(request, note_update_late);
    std::ranges::for_each(waiting_updates_, note_update_late);
}

// --- What the store is told ---------------------------------------------------------------------------------------

void RemoteStore::send_ready() {
    const std::uint64_t sent_before = channel_.sent_bytes();
    while (channel_.is_sending() || send_next()) {
        channel_.flush();
        if (channel_.is_sending()) break;
    }
    if (channel_.sent_bytes() != sent_before) last_move_ = Clock::now();
}

/// What is short goes first. False if there is nothing to be sent.
bool RemoteStore::send_next() {
    return send_pass() || send_forgotten() || ask(IoDirection::read) || ask(IoDirection::write) || ask_for_update() ||
           send_granted();
}

bool RemoteStore::send_pass() {
    if (waiting_passes_.empty()) return false;
    channel_.send(waiting_passes_.front());
    waiting_passes_.pop_front();
    return true;
}

bool RemoteStore::send_forgotten() {
    StoredSegments one;  // outlives the lock
    {
        const std::lock_guard lock(stored_mutex_);
        if (forgotten_.empty()) return false;
        one.splice(one.begin(), forgotten_, forgotten_.begin());
    }
    MessageHeader forget;
    forget.kind = MessageKind::forget;
    forget.segment = one.front().id;
    channel_.send(forget);
    return true;
}

bool RemoteStore::ask(IoDirection direction) {
    const bool is_read = direction == IoDirection::read;
    Transfers& waiting = is_read ? waiting_reads_ : waiting_writes_;
    const std::span<Request> requests = requests_of(direction);
    const auto free = std::ranges::find(requests, Request::State::none, &Request::state);
    if (waiting.empty() || free == requests.end()) return false;
    Transfer& transfer = waiting.front();
    StoredPage& stored = stored_page(transfer);
    if (transfer.begin_ns == 0) transfer.begin_ns = activity_now_ns();
    if (!is_read && transfer.version == 0) transfer.version = ++stored.last_version;
    free->transfer.splice(free->transfer.end(), waiting, waiting.begin());
    free->state = Request::State::asked;
    channel_.send(header_of(is_read ? MessageKind::read : MessageKind::write, *free));
    return true;
}

bool RemoteStore::send_granted() {
    const auto granted = std::ranges::find(requests_, Request::State::granted, &Request::state);
    if (granted == requests_.end()) return false;
    Transfer& transfer = granted->transfer.front();
    MessageHeader header = header_of(MessageKind::bytes, *granted);
    header.body_checksum = transfer.checksum = checksum_of_body(header, transfer.bytes);
    granted->state = Request::State::sent;
    channel_.send(header, transfer.bytes);
    return true;
}

std::span<RemoteStore::Request> RemoteStore::requests_of(IoDirection direction) noexcept {
    const std::span<Request> all(requests_);
    return direction == IoDirection::read ? all.first(capacity_) : all.last(capacity_);
}

MessageHeader RemoteStore::header_of(MessageKind kind, const Request& request) {
    const Transfer& transfer = request.transfer.front();
    MessageHeader header;
    header.kind = kind;
    header.request = static_cast<std::uint32_t>(&request - requests_.data());
    header.client = client_id_;
    header.segment = transfer.segment->id();
    header.role = transfer.segment->trace_id;
    header.segment_bytes = transfer.segment->size_bytes();
    header.page_bytes = transfer.segment->page_bytes();
    header.page = transfer.segment->index_of(*transfer.page);
    header.version = transfer.direction == IoDirection::read ? stored_page(transfer).version : transfer.version;
    return header;
}

/// The page's entry, which stays where it is.
RemoteStore::StoredPage& RemoteStore::stored_page(const Transfer& transfer) {
    return stored_segment(*transfer.segment).pages[transfer.segment->index_of(*transfer.page)];
}

RemoteStore::StoredSegment& RemoteStore::stored_segment(const Segment& segment) {
    const std::lock_guard lock(stored_mutex_);
    const auto found = segment_by_id_.find(segment.id());
    if (found != segment_by_id_.end()) return *found->second;
    StoredSegments one;
    one.push_back({segment.id(), 0, std::vector<StoredPage>(segment.page_count())});
    segment_by_id_.emplace(segment.id(), one.begin());
    segments_.splice(segments_.end(), one);
    return segments_.back();
}

// --- What it says -------------------------------------------------------------------------------------------------

void RemoteStore::receive_arrived() {
    const std::uint64_t received_before = channel_.received_bytes();
    Channel::Arrival arrival{};
    while ((arrival = channel_.receive()) != Channel::Arrival::nothing) {
        if (arrival == Channel::Arrival::header) {
            place_body();
        } else {
            take_message();
        }
    }
    if (channel_.received_bytes() != received_before) last_move_ = Clock::now();
}

/// A page comes into the frame of who asked for it, a text into the place for texts.
void RemoteStore::place_body() {
    const MessageHeader& header = channel_.header();
    if (header.kind == MessageKind::page) {
        const Transfer& transfer = meant().transfer.front();
        const bool is_asked = transfer.direction == IoDirection::read && header.body_bytes == transfer.bytes.size();
        if (!is_asked) break_off("it sent a page that was not asked for");
        channel_.receive_into(transfer.bytes);
        return;
    }
    if (header.body_bytes > text_.size()) break_off("it sent a text that is too long");
    channel_.receive_into(std::as_writable_bytes(std::span(text_)).first(header.body_bytes));
}

void RemoteStore::take_message() {
    if (channel_.header().request >= requests_.size()) {
        return channel_.header().kind == MessageKind::updated ? end_update() : end_update_failed();
    }
    Request& request = meant();
    const bool is_write = request.transfer.front().direction == IoDirection::write;
    switch (channel_.header().kind) {
        case MessageKind::page:
            return end_read(request);
        case MessageKind::granted:
            if (!is_write || request.state != Request::State::asked) break_off("it granted what was not asked for");
            request.state = Request::State::granted;
            return;
        case MessageKind::stored:
            if (request.state != Request::State::sent) break_off("it stored what was not sent");
            return end_write(request);
        case MessageKind::damaged:
            if (request.state != Request::State::sent) break_off("it complains of what was not sent");
            return ask_again(request);
        case MessageKind::failed:
            return end_failed(request, TransferStatus::not_now);
        case MessageKind::lost:
            return end_failed(request, is_write ? TransferStatus::not_now : TransferStatus::lost);
        default:
            break_off("it sent what only a client says");
    }
}

/// The request that the message which arrives is an answer to.
RemoteStore::Request& RemoteStore::meant() {
    const std::uint32_t number = channel_.header().request;
    if (number >= requests_.size() || requests_[number].transfer.empty()) break_off("it answers what was not asked");
    return requests_[number];
}

/// All of it has come.
void RemoteStore::end_read(Request& request) {
    Transfer& transfer = request.transfer.front();
    if (channel_.header().body_bytes != transfer.bytes.size()) break_off("it sent a page without bytes");
    const bool is_as_written =
        checksum_of_body(header_of(MessageKind::read, request), transfer.bytes) == stored_page(transfer).checksum;
    if (!is_as_written) return ask_again(request);
    if (transfer.is_second) healed_mismatches_.increment();
    request.state = Request::State::none;
    end(request.transfer, {TransferStatus::ok, nullptr, transfer.begin_ns});
}

void RemoteStore::end_write(Request& request) {
    const Transfer& transfer = request.transfer.front();
    note_stored(*transfer.segment, transfer.segment->index_of(*transfer.page), transfer.version, transfer.checksum);
    request.state = Request::State::none;
    end(request.transfer, {TransferStatus::ok, nullptr, transfer.begin_ns});
}

void RemoteStore::note_stored(const Segment& segment, std::size_t index, std::uint64_t version,
                              std::uint64_t checksum) {
    StoredSegment& stored = stored_segment(segment);
    StoredPage& page = stored.pages[index];
    if (page.version == 0) {
        const std::size_t size_bytes = segment.page_range(index).size();
        stored.stored_bytes += size_bytes;
        stored_bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
    }
    page.version = version;
    page.checksum = checksum;
}

/// Bytes that arrived with another checksum go once more. What arrives so twice is lost there, or stays here.
void RemoteStore::ask_again(Request& request) {
    Transfer& transfer = request.transfer.front();
    const bool is_read = transfer.direction == IoDirection::read;
    request.state = Request::State::none;
    if (!std::exchange(transfer.is_second, true)) {
        OFFLOAD_LOG(warning, describe(transfer, "it arrived with another checksum, and goes again"));
        (is_read ? retried_reads_ : retried_writes_).increment();
        Transfers& waiting = is_read ? waiting_reads_ : waiting_writes_;
        waiting.splice(waiting.begin(), request.transfer);
        return;
    }
    if (is_read) {
        const std::exception_ptr error = exception_from([&] {
            return CorruptPage(describe(transfer,
                                        "checksum mismatch, also when read again; the page is lost: overwrite the "
                                        "tensor, or restart from the last checkpoint"));
        });
        end(request.transfer, {TransferStatus::lost, error});
        return;
    }
    const std::exception_ptr error = exception_from([&] {
        return TierIoError(describe(transfer,
                                    "checksum mismatch, also when sent again; nothing is lost, the page "
                                    "stays in memory"),
                           EBADMSG);
    });
    end(request.transfer, {TransferStatus::not_now, error});
}

/// The store says why.
void RemoteStore::end_failed(Request& request, TransferStatus status) {
    const MessageHeader& header = channel_.header();
    const std::string_view why(text_.data(), header.body_bytes);
    const Transfer& transfer = request.transfer.front();
    const std::exception_ptr error = exception_from(
        [&]() -> TierIoError { return {describe(transfer, concat("it failed there: ", why)), header.error_number}; });
    request.state = Request::State::none;
    end(request.transfer, {status, error});
}

void RemoteStore::end(Transfers& one, const TransferEnd& end) noexcept {
    Transfers ended;
    ended.swap(one);  // its place is free again
    const Transfer& transfer = ended.front();
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    kicked_.store(true, std::memory_order_release);
    if (transfer.direction == IoDirection::read) {
        reads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
        client_->end_read(transfer.segment, *transfer.page, end);
    } else {
        client_->end_write(*transfer.page, end);
    }
}

/// The store is gone: what was to be read went with it, what was to be written is still in memory.
void RemoteStore::end_all(const TierIoError& error) noexcept {
    Transfers left;
    for (Request& request : requests_) {
        left.splice(left.end(), request.transfer);
        request.state = Request::State::none;
    }
    for (Transfers* waiting : {&waiting_reads_, &waiting_writes_}) left.splice(left.end(), *waiting);
    while (!left.empty()) {
        Transfers one;
        one.splice(one.begin(), left, left.begin());
        const bool is_read = one.front().direction == IoDirection::read;
        const char* const what = is_read ? "the page is gone: restart from the last checkpoint"
                                         : "nothing is lost yet, the page stays in memory";
        const std::exception_ptr why = exception_from(
            [&] { return TierIoError(concat(error.what(), "; ", describe(one.front(), what)), error.error_number()); });
        end(one, {is_read ? TransferStatus::lost : TransferStatus::not_now, why});
    }
    end_all_updates(error);
    waiting_passes_.clear();
}

std::string RemoteStore::describe(const Transfer& transfer, const std::string& what) const {
    const char* const verb = transfer.direction == IoDirection::read ? "reading" : "writing";
    return concat(name_, ": ", verb, " page ", transfer.segment->index_of(*transfer.page), " of ",
                  transfer.segment->label, ": ", what);
}

void RemoteStore::break_off(const char* why) const { throw TierIoError(concat(name_, ": ", why), EPROTO); }

}  // namespace torch_offload
