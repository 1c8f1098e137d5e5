// Deferred work that the store's own process runs: only gradients go there, and weights come back.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "pager/page_table.h"
#include "pager/remote_store.h"

namespace torch_offload {

bool RemoteStore::runs_work_on(std::span<const std::shared_ptr<Segment>> segments, std::size_t index) const noexcept {
    std::size_t size_bytes = 0;
    for (const std::shared_ptr<Segment>& segment : segments) size_bytes += segment->page_range(index).size();
    return segments.size() <= kMaxMembers && size_bytes <= max_update_bytes_;
}

void RemoteStore::run_work(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, RemoteWork work) {
    const std::size_t body_bytes = segments.size() * sizeof(MemberPage) + work.operators.size();
    OFFLOAD_CHECK(body_bytes <= kMaxUpdateBytes, LogicError, "an update that takes ", body_bytes, " bytes to describe");
    Updates one;
    Update& update = one.emplace_back();
    update.segments.assign(segments.begin(), segments.end());
    update.index = index;
    update.members.reserve(segments.size());  // as the body, so that asking cannot fail
    update.body.reserve(body_bytes);
    update.work = std::move(work);
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard lock(queue_mutex_);
        queued_updates_.splice(queued_updates_.end(), one);
    }
    wake_.raise();
}

void RemoteStore::end_work() noexcept {
    ends_work_.store(true, std::memory_order_release);
    wake_.raise();
}

bool RemoteStore::ask_for_update() {
    const auto free = std::ranges::find_if(update_requests_, &Updates::empty);
    if (waiting_updates_.empty() || free == update_requests_.end()) return false;
    Update& update = waiting_updates_.front();
    describe_members(update);
    free->splice(free->end(), waiting_updates_, waiting_updates_.begin());
    MessageHeader header;
    header.kind = MessageKind::update;
    header.request = static_cast<std::uint32_t>(requests_.size() + (free - update_requests_.begin()));
    header.client = client_id_;
    header.page = update.index;
    header.count = update.members.size();
    header.body_checksum = checksum_of_body(header, update.body);
    channel_.send(header, update.body);
    return true;
}

void RemoteStore::describe_members(Update& update) {
    for (std::size_t k = 0; k < update.segments.size(); ++k) {
        const Segment& segment = *update.segments[k];
        StoredPage& stored = stored_segment(segment).pages[update.index];
        update.members.push_back({segment.id(), segment.trace_id, segment.size_bytes(), segment.page_bytes(),
                                  ++stored.last_version, update.work.is_worthless[k] ? std::uint64_t{1} : 0});
    }
    const auto bytes = std::as_bytes(std::span(update.members));
    update.body.assign(bytes.begin(), bytes.end());
    update.body.insert(update.body.end(), update.work.operators.begin(), update.work.operators.end());
}

/// The update that the message which has come is an answer to; its place is free again.
RemoteStore::Updates RemoteStore::take_answered() {
    const std::size_t number = channel_.header().request - requests_.size();
    if (number >= update_requests_.size() || update_requests_[number].empty()) {
        break_off("it answers what was not asked");
    }
    Updates one;
    one.swap(update_requests_[number]);
    return one;
}

/// All or some of the operators have run.
void RemoteStore::end_update() {
    Updates one = take_answered();
    const Update& update = one.front();
    const MessageHeader& answer = channel_.header();
    const std::span<const char> body = std::span(text_).first(answer.body_bytes);
    const std::size_t checksum_bytes = update.members.size() * sizeof(std::uint64_t);
    const bool is_whole =
        body.size() >= checksum_bytes && checksum_of_body(answer, std::as_bytes(body)) == answer.body_checksum;
    if (!is_whole) {
        const TierIoError error(describe(update, "the answer came damaged: restart from the last checkpoint"), EBADMSG);
        end(std::move(one), 0, std::make_exception_ptr(error));
        throw error;  // nobody knows what its pages are now
    }
    for (std::size_t k = 0; answer.count > 0 && k < update.members.size(); ++k) {
        std::uint64_t checksum = 0;
        std::memcpy(&checksum, body.data() + k * sizeof(checksum), sizeof(checksum));
        note_stored(*update.segments[k], update.index, update.members[k].version, checksum);
    }
    const std::string_view why(body.data() + checksum_bytes, body.size() - checksum_bytes);
    std::exception_ptr error;
    if (!why.empty()) error = failure_of(update, "it failed there: ", why, answer.error_number);
    end(std::move(one), answer.count, error);
}

/// Nothing has changed there.
void RemoteStore::end_update_failed() {
    const MessageKind kind = channel_.header().kind;
    const bool is_failure = kind == MessageKind::failed || kind == MessageKind::lost;
    if (!is_failure && kind != MessageKind::damaged) break_off("it answers an update with what is no answer to one");
    Updates one = take_answered();
    const std::string_view why(text_.data(), channel_.header().body_bytes);
    const std::exception_ptr error =
        is_failure ? failure_of(one.front(), "it failed there: ", why, channel_.header().error_number)
                   : failure_of(one.front(), "it came there damaged", {}, EBADMSG);
    end(std::move(one), 0, error);
}

/// Who asked for it may not wait for it, and the page's next use tries again: so the log has it, too.
std::exception_ptr RemoteStore::failure_of(const Update& update, std::string_view what, std::string_view why,
                                           int error_number) const {
    return exception_from([&] {
        const TierIoError error(describe(update, concat(what, why)), error_number);
        OFFLOAD_LOG(warning, error.what());
        return error;
    });
}

void RemoteStore::end(Updates one, std::size_t ran, std::exception_ptr error) noexcept {
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
    kicked_.store(true, std::memory_order_release);
    one.front().work.end(ran, std::move(error));
}

void RemoteStore::end_all_updates(const TierIoError& error) noexcept {
    Updates left;
    for (Updates& request : update_requests_) left.splice(left.end(), request);
    left.splice(left.end(), waiting_updates_);
    while (!left.empty()) {
        Updates one;
        one.splice(one.begin(), left, left.begin());
        const std::exception_ptr why = exception_from([&] {
            return TierIoError(concat(error.what(), "; ", describe(one.front(), "restart from the last checkpoint")),
                               error.error_number());
        });
        end(std::move(one), 0, why);
    }
}

std::string RemoteStore::describe(const Update& update, std::string_view what) const {
    return concat(name_, ": updating page ", update.index, " of ", update.segments.front()->label, ": ", what);
}

}  // namespace torch_offload
