#include "pager/page_server.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/engine_thread.h"
#include "base/log.h"
#include "base/units.h"
#include "pager/ssd_store.h"
#include "pager/stall_clock.h"

namespace torch_offload {

/// One connection. It outlives its requests.
class ServedClient {
public:
    enum class Standing : std::uint8_t { new_here, welcome, refused, gone };

    ServedClient(FileDescriptor socket, const NetAddress& peer)
        : channel(std::move(socket), concat("client ", peer.text())) {}

    Channel channel;
    Standing standing = Standing::new_here;
    std::uint64_t id = 0;
    std::unordered_map<std::uint64_t, std::shared_ptr<Segment>> segments;
    std::size_t request_count = 0;  // of any kind, in whatever list
    PageRequests answers;           // to be sent
    PageRequests sending;           // the one that is
    PageRequests granted;           // whose bytes have not come
    PageRequests arriving;          // the one whose bytes come
    std::string refusal;
    std::uint64_t moved_bytes = 0;  // at the last look
    std::chrono::steady_clock::time_point last_move{};

    bool is_there() const noexcept { return standing != Standing::gone; }
    bool has_memory() const noexcept { return !(sending.empty() && granted.empty() && arriving.empty()); }
};

namespace {

constexpr std::size_t kPageElements = kSectorBytes;  // of the least size: clients' pages are elements of any size
constexpr std::size_t kLentShare = 4;                // one part in so many of the budget
constexpr std::size_t kMinLentBytes = std::size_t{4} * kSectorBytes;
constexpr int kIdleMilliseconds = 200;
constexpr std::chrono::milliseconds kAcceptPause{1'000};  // after there was no room for one more

PagerOptions with_elements(PagerOptions options) {
    OFFLOAD_CHECK(options.budget_bytes / kLentShare >= kMinLentBytes, InvalidArgument, "a budget of ",
                  options.budget_bytes, " bytes is too small for a store, which takes ", kLentShare * kMinLentBytes,
                  "; raise `ram`");
    options.page_elements = kPageElements;
    return options;
}

std::unique_ptr<PageStore> store_of(const PageServerOptions& options) {
    const PagerOptions& pager = options.pager;
    return std::make_unique<SsdStore>(pager.directories, make_io_engine(pager.engine, pager.queue_depth),
                                      pager.transfer_limits, options.scratch_limits);
}

[[noreturn]] void break_off(const ServedClient& client, const char* why) {
    throw TierIoError(concat(client.channel.peer(), ": ", why), EPROTO);
}

std::size_t page_size(const PageRequest& request) noexcept {
    return request.segment->page_range(request.question.page).size();
}

PageRequests take(PageRequests& from, PageRequests::iterator which) noexcept {
    PageRequests one;
    one.splice(one.begin(), from, which);
    return one;
}

}  // namespace

PageServer::PageServer(const PageServerOptions& options)
    : max_lent_bytes_(options.pager.budget_bytes / kLentShare),
      patience_(options.pager.transfer_limits.timeout),
      pager_(with_elements(options.pager), store_of(options)),
      listening_(listen_at(options.address)),
      address_{options.address.host, port_of(listening_)} {
    const auto done = [this](PageRequests one) {
        {
            const std::lock_guard lock(pinned_mutex_);
            pinned_.splice(pinned_.end(), one);
        }
        wake_.raise();
    };
    reads_.emplace(pager_, "to-pin-read", done);
    writes_.emplace(pager_, "to-pin-write", done);
    thread_ = engine_thread("to-serve", [this] { run(); });
}

PageServer::~PageServer() {
    stopping_.store(true, std::memory_order_release);
    wake_.raise();
    thread_.join();
    reads_.reset();
    writes_.reset();
}

PageServerStatistics PageServer::statistics() const {
    return {pager_.statistics(),   client_count_.load(), clients_so_far_.get(), segment_count_.load(),
            received_bytes_.get(), sent_bytes_.get(),    damaged_bytes_.get(),  peak_lent_bytes_.load()};
}

// --- Its thread ---------------------------------------------------------------------------------------------------

void PageServer::run() {
    StallClock::ignore_this_thread();
    while (!stopping_.load(std::memory_order_acquire)) {
        const std::vector<bool> is_readable = wait();
        take_pinned();
        std::size_t number = 0;
        for (ServedClient& client : clients_) serve(client, is_readable[number++]);
        accept_clients();
        drop_stalled();
        give_credits();
        drop_gone();
    }
    for (ServedClient& client : clients_) leave(client);
}

/// Until something is to be done. Which of the clients have something to say.
std::vector<bool> PageServer::wait() {
    std::vector<pollfd> polled;
    polled.reserve(clients_.size() + 2);
    for (const ServedClient& client : clients_) {  // of one that is gone the descriptor is below 0, and passed over
        const auto wanted = static_cast<short>(client.channel.is_sending() ? POLLIN | POLLOUT : POLLIN);
        polled.push_back({client.channel.file_descriptor(), wanted, 0});
    }
    polled.push_back({wake_.file_descriptor(), POLLIN, 0});
    if (Clock::now() >= accept_from_) polled.push_back({listening_.get(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), kIdleMilliseconds);
    wake_.clear();
    std::vector<bool> is_readable;
    is_readable.reserve(polled.size());
    for (const pollfd& each : polled) is_readable.push_back((each.revents & ~POLLOUT) != 0);
    return is_readable;
}

void PageServer::accept_clients() {
    if (Clock::now() < accept_from_) return;
    try {
        while (std::optional<AcceptedSocket> accepted = accept_from(listening_)) {
            clients_.emplace_back(std::move(accepted->socket), accepted->peer);
        }
    } catch (const TierIoError& error) {
        OFFLOAD_LOG(warning, "store: ", error.what(), "; raise the limit on open files (ulimit -n)");
        accept_from_ = Clock::now() + kAcceptPause;
    }
}

/// A connection that fails ends, and nothing else.
void PageServer::serve(ServedClient& client, bool is_readable) noexcept {
    if (!client.is_there()) return;
    try {
        if (is_readable) receive_from(client);
        send_to(client);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(info, "store: ", error.what());
        if (client.standing == ServedClient::Standing::new_here && !client.channel.is_sending()) {
            refuse(client, error.what());
        } else {
            leave(client);
        }
    }
    const std::uint64_t moved_bytes = client.channel.received_bytes() + client.channel.sent_bytes();
    if (std::exchange(client.moved_bytes, moved_bytes) != moved_bytes) client.last_move = Clock::now();
}

// --- What clients say ---------------------------------------------------------------------------------------------

void PageServer::receive_from(ServedClient& client) {
    if (client.standing == ServedClient::Standing::refused) return client.channel.discard();  // until it hangs up
    while (client.is_there()) {
        switch (client.channel.receive()) {
            case Channel::Arrival::nothing:
                return;
            case Channel::Arrival::header:
                place_body(client);
                break;
            case Channel::Arrival::message:
                take_message(client);
                break;
        }
    }
}

/// Only bytes that were granted have a place.
void PageServer::place_body(ServedClient& client) {
    const MessageHeader& header = client.channel.header();
    const auto is_meant = [&](const PageRequest& request) { return request.question.request == header.request; };
    const auto found = std::ranges::find_if(client.granted, is_meant);
    const bool is_granted = header.kind == MessageKind::bytes && found != client.granted.end();
    if (!is_granted || header.body_bytes != found->bytes.size()) break_off(client, "it sent what was not granted");
    client.arriving.splice(client.arriving.end(), client.granted, found);
    client.channel.receive_into(client.arriving.front().bytes);
}

void PageServer::take_message(ServedClient& client) {
    const MessageHeader& header = client.channel.header();
    const bool is_known = client.standing == ServedClient::Standing::welcome;
    if (is_known != (header.kind != MessageKind::hello)) break_off(client, "it did not say hello first, and once");
    switch (header.kind) {
        case MessageKind::hello:
            return greet(client);
        case MessageKind::read:
        case MessageKind::write:
            return take_question(client);
        case MessageKind::bytes:
            return take_bytes(client);
        case MessageKind::forget:
            return forget(client, header.segment);
        default:
            break_off(client, "it sent what only a store says");
    }
}

void PageServer::greet(ServedClient& client) {
    const std::uint64_t page_bytes = client.channel.header().page_bytes;
    if (page_bytes > max_lent_bytes_) {
        return refuse(client, concat("its memory of ", pager_.options().budget_bytes,
                                     " bytes is too small for pages of ", page_bytes, "; start it with --ram ",
                                     kLentShare * page_bytes, " at least, or lower page_elements"));
    }
    client.standing = ServedClient::Standing::welcome;
    client.id = next_client_++;
    clients_so_far_.increment();
    client_count_.fetch_add(1);
    MessageHeader welcome;
    welcome.kind = MessageKind::welcome;
    welcome.client = client.id;
    client.channel.send(welcome);
    OFFLOAD_LOG(info, "store: ", client.channel.peer(), " is client ", client.id);
}

void PageServer::refuse(ServedClient& client, std::string text) {
    client.standing = ServedClient::Standing::refused;
    client.refusal = std::move(text);
    client.refusal.resize(std::min(client.refusal.size(), kMaxTextBytes));
    MessageHeader refused;
    refused.kind = MessageKind::refused;
    client.channel.send(refused, std::as_bytes(std::span(client.refusal)));
}

void PageServer::take_question(ServedClient& client) {
    if (client.request_count == kMaxRequests) break_off(client, "it asks for too many pages at once");
    PageRequests one(1);
    PageRequest& request = one.front();
    request.client = &client;
    request.question = client.channel.header();
    client.request_count += 1;
    try {
        find_page(request);
    } catch (...) {
        return answer_error(one, std::current_exception());
    }
    waiting_.splice(waiting_.end(), one);
}

/// The first page of a segment that is written makes it. Throws: InvalidArgument for one that there cannot be.
std::shared_ptr<Segment> PageServer::segment_of(ServedClient& client, const MessageHeader& question) {
    const auto found = client.segments.find(question.segment);
    if (found != client.segments.end()) return found->second;
    OFFLOAD_CHECK(question.kind == MessageKind::write, InvalidArgument, "there is no segment ", question.segment);
    OFFLOAD_CHECK(question.page_bytes % kPageElements == 0, InvalidArgument, "pages of ", question.page_bytes,
                  " bytes; a store keeps multiples of ", kPageElements);
    std::shared_ptr<Segment> made =
        pager_.create_segment(question.segment_bytes, question.page_bytes / kPageElements, SegmentKind::other);
    made->label = concat("segment ", question.segment, " of ", client.channel.peer());
    client.segments.emplace(question.segment, made);
    segment_count_.fetch_add(1);
    return made;
}

/// Throws: InvalidArgument for a page that there cannot be.
void PageServer::find_page(PageRequest& request) {
    const MessageHeader& question = request.question;
    request.segment = segment_of(*request.client, question);
    OFFLOAD_CHECK(question.page < request.segment->page_count(), InvalidArgument, "segment ", question.segment, " has ",
                  request.segment->page_count(), " pages, asked for is page ", question.page);
    OFFLOAD_CHECK(page_size(request) <= max_lent_bytes_, InvalidArgument, "a page of ", page_size(request),
                  " bytes; a store with this --ram takes at most ", max_lent_bytes_);
    if (question.kind == MessageKind::read) pager_.prefetch_page(request.segment, question.page);
}

/// All of a page has come.
void PageServer::take_bytes(ServedClient& client) {
    PageRequests one = take(client.arriving, client.arriving.begin());
    PageRequest& request = one.front();
    MessageHeader said = request.question;
    said.client = client.id;
    said.version = client.channel.header().version;
    const bool is_whole = checksum_of_body(said, request.bytes) == client.channel.header().body_checksum;
    (is_whole ? received_bytes_ : damaged_bytes_).add(request.bytes.size());
    give_back(request);
    answer(one, is_whole ? MessageKind::stored : MessageKind::damaged);
}

void PageServer::forget(ServedClient& client, std::uint64_t segment) {
    segment_count_.fetch_sub(client.segments.erase(segment));
}

// --- Memory for pages on their way --------------------------------------------------------------------------------

/// In the order in which they were asked for, whoever asked.
void PageServer::give_credits() {
    while (!waiting_.empty()) {
        const PageRequest& next = waiting_.front();
        if (lent_bytes_ + page_size(next) > max_lent_bytes_) return;
        lent_bytes_ += page_size(next);
        if (lent_bytes_ > peak_lent_bytes_.load()) peak_lent_bytes_.store(lent_bytes_);
        (next.question.kind == MessageKind::read ? reads_ : writes_)->pin(waiting_);
    }
}

void PageServer::take_pinned() {
    PageRequests pinned;
    {
        const std::lock_guard lock(pinned_mutex_);
        pinned.swap(pinned_);
    }
    while (!pinned.empty()) {
        PageRequests one = take(pinned, pinned.begin());
        PageRequest& request = one.front();
        request.client->last_move = Clock::now();
        if (!request.client->is_there()) {
            end(one);
        } else if (request.error) {
            give_back(request);
            answer_error(one, request.error);
        } else {
            answer(one, request.question.kind == MessageKind::read ? MessageKind::page : MessageKind::granted);
        }
    }
}

void PageServer::give_back(PageRequest& request) noexcept {
    if (request.segment) lent_bytes_ -= page_size(request);
    request.guard = PinGuard();
    request.bytes = {};
    request.segment.reset();
}

void PageServer::end(PageRequests& requests) noexcept {
    for (PageRequest& request : requests) {
        give_back(request);
        request.client->request_count -= 1;
    }
    requests.clear();
}

// --- What they are told -------------------------------------------------------------------------------------------

void PageServer::answer(PageRequests& one, MessageKind kind) noexcept {
    PageRequest& request = one.front();
    request.answer.kind = kind;
    request.answer.request = request.question.request;
    request.client->answers.splice(request.client->answers.end(), one);
}

void PageServer::answer_error(PageRequests& one, std::exception_ptr error) noexcept {
    PageRequest& request = one.front();
    request.segment.reset();
    MessageKind kind = MessageKind::failed;
    try {
        std::rethrow_exception(error);
    } catch (const CorruptPage& corrupt) {
        kind = MessageKind::lost;
        request.text = corrupt.what();
    } catch (const TierIoError& failed) {
        request.answer.error_number = failed.error_number();
        request.text = failed.what();
    } catch (const std::exception& failed) {
        request.text = failed.what();
    }
    request.text.resize(std::min(request.text.size(), kMaxTextBytes));
    answer(one, kind);
}

void PageServer::send_to(ServedClient& client) {
    while (client.is_there()) {
        if (client.channel.is_sending()) {
            client.channel.flush();
            if (client.channel.is_sending()) return;
            end_sent(client);
        }
        if (client.answers.empty()) return;
        client.sending.splice(client.sending.end(), client.answers, client.answers.begin());
        const PageRequest& request = client.sending.front();
        const bool is_page = request.answer.kind == MessageKind::page;
        client.channel.send(request.answer, is_page ? request.bytes : std::as_bytes(std::span(request.text)));
    }
}

/// All of an answer has gone; of a grant, bytes will come.
void PageServer::end_sent(ServedClient& client) noexcept {
    if (client.sending.empty()) return;  // it was no answer to a request
    const PageRequest& request = client.sending.front();
    if (request.answer.kind == MessageKind::granted) {
        client.granted.splice(client.granted.end(), client.sending);
        return;
    }
    if (request.answer.kind == MessageKind::page) sent_bytes_.add(request.bytes.size());
    end(client.sending);
}

// --- Who goes -----------------------------------------------------------------------------------------------------

/// Its pages are gone with it, but for those that a lane has at hand.
void PageServer::leave(ServedClient& client) noexcept {
    if (!client.is_there()) return;
    OFFLOAD_LOG(info, "store: ", client.channel.peer(), " has left ", client.segments.size(), " segments");
    if (client.standing == ServedClient::Standing::welcome) client_count_.fetch_sub(1);
    client.standing = ServedClient::Standing::gone;
    client.channel.close();
    for (auto next = waiting_.begin(); next != waiting_.end();) {
        const auto request = next++;
        if (request->client != &client) continue;
        request->segment.reset();  // it has no memory yet
        PageRequests one = take(waiting_, request);
        end(one);
    }
    for (PageRequests* requests : {&client.answers, &client.sending, &client.granted, &client.arriving}) end(*requests);
    segment_count_.fetch_sub(client.segments.size());
    client.segments.clear();
}

/// Others wait for memory that a client has which neither takes nor sends anything.
void PageServer::drop_stalled() {
    if (waiting_.empty()) return;
    const auto now = Clock::now();
    for (ServedClient& client : clients_) {
        if (!client.is_there() || !client.has_memory() || now - client.last_move < patience_) continue;
        OFFLOAD_LOG(warning, "store: ", client.channel.peer(), " has not moved for ",
                    std::chrono::duration<double>(patience_).count(),
                    " s and has memory that others wait for: the connection is ended");
        leave(client);
    }
}

void PageServer::drop_gone() {
    std::erase_if(clients_, [](const ServedClient& client) { return !client.is_there() && client.request_count == 0; });
}

}  // namespace torch_offload
