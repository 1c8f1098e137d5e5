#include "pager/page_server.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/activity_log.h"
#include "base/check.h"
#include "base/engine_thread.h"
#include "base/log.h"
#include "base/units.h"
#include "pager/served_uses.h"
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
    ServedUses uses;
    std::size_t request_count = 0;  // of any kind, in whatever list
    PageRequests answers;           // to be sent
    PageRequests sending;           // the one that is
    PageRequests granted;           // whose bytes have not come
    PageRequests arriving;          // the one whose bytes come
    std::vector<std::byte> body;    // of a message that is none of a page
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
constexpr std::chrono::milliseconds kOverdue{1'000};      // and a pass, after a client was to need a page
static_assert(kNoRole == kNoTrace);

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

std::uint64_t new_identity() {
    std::random_device random;
    return (std::uint64_t{random()} << 32) | random();
}

[[noreturn]] void break_off(const ServedClient& client, const char* why) {
    throw TierIoError(concat(client.channel.peer(), ": ", why), EPROTO);
}

std::size_t page_size(const PageRequest& request) noexcept {
    return request.segment->page_range(request.question.page).size();
}

void pin_page(Pager& pager, PageRequest& request) noexcept {
    const bool is_read = request.question.kind == MessageKind::read;
    const std::size_t index = request.question.page;
    try {
        pager.touch(request.segment);
        request.guard = pager.pin_pages(request.segment, index, 1, is_read ? Access::read : Access::overwrite);
        request.guard.keep();
        request.bytes = pager.copied_range(*request.segment, index);
    } catch (...) {
        request.error = std::current_exception();
    }
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
      run_work_(options.run_work),
      kernels_(options.kernels),
      identity_(new_identity()),
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
    const auto pin = [this](PageRequest& request) { pin_page(pager_, request); };
    reads_.emplace("to-pin-read", pin, done);
    writes_.emplace("to-pin-write", pin, done);
    const auto update = [this](PageRequest& request) { run_update(pager_, request, request.client->id, run_work_); };
    updates_lane_.emplace("to-update", update, done);
    thread_ = engine_thread("to-serve", [this] { run(); });
}

PageServer::~PageServer() {
    stopping_.store(true, std::memory_order_release);
    wake_.raise();
    thread_.join();
    reads_.reset();
    writes_.reset();
    updates_lane_.reset();
}

PageServerStatistics PageServer::statistics() const {
    return {pager_.statistics(),   client_count_.load(), clients_so_far_.get(), segment_count_.load(),
            received_bytes_.get(), sent_bytes_.get(),    damaged_bytes_.get(),  peak_lent_bytes_.load(),
            updates_.get(),        update_bytes_.get()};
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
        end_overdue();
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

/// Bytes of pages have one where they were granted.
void PageServer::place_body(ServedClient& client) {
    const MessageHeader& header = client.channel.header();
    if (header.kind == MessageKind::hello || header.kind == MessageKind::update) {
        const std::size_t most = header.kind == MessageKind::hello ? kMaxTextBytes : kMaxUpdateBytes;
        if (header.body_bytes > most) break_off(client, "it sent a text or an update that is too long");
        client.body.resize(header.body_bytes);
        return client.channel.receive_into(client.body);
    }
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
        case MessageKind::update:
            return take_update(client);
        case MessageKind::pass:
            return client.uses.begin_pass(header.count, activity_now_ns());
        case MessageKind::step:
            return client.uses.end_step(activity_now_ns());
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
    welcome.version = identity_;
    welcome.segment_bytes = pager_.options().budget_bytes;
    client.refusal = why_no_updates(client);
    client.refusal.resize(std::min(client.refusal.size(), kMaxTextBytes));
    welcome.page_bytes = client.refusal.empty() ? max_lent_bytes_ : 0;
    client.channel.send(welcome, std::as_bytes(std::span(client.refusal)));
    OFFLOAD_LOG(info, "store: ", client.channel.peer(), " is client ", client.id);
}

/// Empty: it gets them, with the bits that it computes itself.
std::string PageServer::why_no_updates(const ServedClient& client) const {
    if (!run_work_) return "it was started without";
    const std::string_view kernels(reinterpret_cast<const char*>(client.body.data()), client.body.size());
    if (kernels == kernels_) return {};
    return concat("its kernels (", kernels_, ") may give other bits than those here (", kernels, ")");
}

void PageServer::refuse(ServedClient& client, std::string text) {
    client.standing = ServedClient::Standing::refused;
    client.refusal = std::move(text);
    client.refusal.resize(std::min(client.refusal.size(), kMaxTextBytes));
    MessageHeader refused;
    refused.kind = MessageKind::refused;
    client.channel.send(refused, std::as_bytes(std::span(client.refusal)));
}

/// Of the message that has come.
PageRequests PageServer::request_of(ServedClient& client) {
    if (client.request_count == kMaxRequests) break_off(client, "it asks for too many pages at once");
    PageRequests one(1);
    one.front().client = &client;
    one.front().question = client.channel.header();
    client.request_count += 1;
    return one;
}

void PageServer::take_question(ServedClient& client) {
    PageRequests one = request_of(client);
    try {
        find_page(one.front());
    } catch (...) {
        return answer_error(one, std::current_exception());
    }
    waiting_.splice(waiting_.end(), one);
}

/// The first page of a segment that is written or updated makes it. Throws: InvalidArgument for one that there cannot
/// be.
std::shared_ptr<Segment> PageServer::make_segment(ServedClient& client, const MemberPage& member) {
    const auto found = client.segments.find(member.segment);
    if (found != client.segments.end()) return found->second;
    OFFLOAD_CHECK(member.page_bytes % kPageElements == 0, InvalidArgument, "pages of ", member.page_bytes,
                  " bytes; a store keeps multiples of ", kPageElements);
    std::shared_ptr<Segment> made =
        pager_.create_segment(member.segment_bytes, member.page_bytes / kPageElements, SegmentKind::other);
    made->label = concat("segment ", member.segment, " of ", client.channel.peer());
    client.segments.emplace(member.segment, made);
    segment_count_.fetch_add(1);
    return made;
}

/// Throws: InvalidArgument for a page that there cannot be.
void PageServer::find_page(PageRequest& request) {
    const MessageHeader& question = request.question;
    ServedClient& client = *request.client;
    OFFLOAD_CHECK(question.kind == MessageKind::write || client.segments.contains(question.segment), InvalidArgument,
                  "there is no segment ", question.segment);
    request.segment =
        make_segment(client, {question.segment, question.role, question.segment_bytes, question.page_bytes});
    OFFLOAD_CHECK(question.page < request.segment->page_count(), InvalidArgument, "segment ", question.segment, " has ",
                  request.segment->page_count(), " pages, asked for is page ", question.page);
    OFFLOAD_CHECK(page_size(request) <= max_lent_bytes_, InvalidArgument, "a page of ", page_size(request),
                  " bytes; a store with this --ram takes at most ", max_lent_bytes_);
    client.uses.begin(pager_, request);
    if (question.kind == MessageKind::read) pager_.prefetch_page(request.segment, question.page);
}

void PageServer::take_update(ServedClient& client) {
    PageRequests one = request_of(client);
    PageRequest& request = one.front();
    request.body.swap(client.body);
    update_bytes_.add(request.body.size());
    if (checksum_of_body(request.question, request.body) != request.question.body_checksum) {
        return answer(one, MessageKind::damaged);
    }
    try {
        find_members(request);
    } catch (...) {
        return answer_error(one, std::current_exception());
    }
    updates_lane_->take(one);
}

/// Throws: InvalidArgument for an update that there cannot be.
void PageServer::find_members(PageRequest& request) {
    OFFLOAD_CHECK(run_work_, InvalidArgument, "this store runs no updates");
    request.members = members_of(request);
    const std::uint64_t index = request.question.page;
    std::size_t size_bytes = 0;
    for (const MemberPage& member : request.members) {
        const std::shared_ptr<Segment> segment = make_segment(*request.client, member);
        OFFLOAD_CHECK(index < segment->page_count(), InvalidArgument, "segment ", member.segment, " has ",
                      segment->page_count(), " pages, to be updated is page ", index);
        OFFLOAD_CHECK(std::ranges::find(request.segments, segment) == request.segments.end(), InvalidArgument,
                      "segment ", member.segment, " is named twice in an update");
        size_bytes += segment->page_range(index).size();
        request.segments.push_back(segment);
    }
    OFFLOAD_CHECK(size_bytes <= max_lent_bytes_, InvalidArgument, "an update of ", size_bytes,
                  " bytes of pages; a store with this --ram runs those of at most ", max_lent_bytes_);
    request.client->uses.begin(pager_, request);
    for (const std::shared_ptr<Segment>& segment : request.segments) pager_.prefetch_page(segment, index);
}

/// All of a page has come.
void PageServer::take_bytes(ServedClient& client) {
    if (client.arriving.empty()) break_off(client, "it sent a page without bytes");
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
        (next.question.kind == MessageKind::read ? reads_ : writes_)->take(waiting_);
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
        } else if (request.question.kind == MessageKind::update) {
            answer_update(one);
        } else {
            answer(one, request.question.kind == MessageKind::read ? MessageKind::page : MessageKind::granted);
        }
    }
}

void PageServer::give_back(PageRequest& request) noexcept {
    if (request.segment) lent_bytes_ -= page_size(request);
    request.guard = PinGuard();
    request.bytes = {};
    request.client->uses.end(pager_, request);
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

void PageServer::answer_update(PageRequests& one) noexcept {
    PageRequest& request = one.front();
    if (request.ran > 0) updates_.increment();
    request.client->uses.end(pager_, request);
    request.answer.count = request.ran;
    request.answer.body_checksum = checksum_of_body(request.answer, std::as_bytes(std::span(request.text)));
    answer(one, MessageKind::updated);
}

void PageServer::answer_error(PageRequests& one, std::exception_ptr error) noexcept {
    PageRequest& request = one.front();
    request.client->uses.end(pager_, request);
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
        client.uses.end(pager_, *request);  // it has no memory yet
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

/// A client that is elsewhere, or needs pages no more, has no claim on memory for them.
void PageServer::end_overdue() {
    const auto now = Clock::now();
    if (now < look_overdue_at_) return;
    look_overdue_at_ = now + kOverdue;
    const std::int64_t overdue_ns = std::chrono::nanoseconds(kOverdue).count();
    const std::int64_t now_ns = activity_now_ns();
    for (const ServedClient& client : clients_) {
        for (const auto& [number, segment] : client.segments) {
            client.uses.end_overdue(pager_, *segment, overdue_ns, now_ns);
        }
    }
}

void PageServer::drop_gone() {
    std::erase_if(clients_, [](const ServedClient& client) { return !client.is_there() && client.request_count == 0; });
}

}  // namespace torch_offload
