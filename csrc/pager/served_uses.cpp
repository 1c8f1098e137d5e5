#include "pager/served_uses.h"

#include <algorithm>
#include <optional>

#include "base/activity_log.h"

namespace torch_offload {
namespace {

/// Of pages that are numbered below 2^32 each.
std::uint64_t key_of(std::uint64_t role, std::uint64_t page) noexcept { return role << 32 | page; }

}  // namespace

void ServedUses::begin_pass(ProgramId program, std::int64_t now_ns) {
    has_passes_ = true;
    trace_.begin_pass(program, now_ns);
}

void ServedUses::end_step(std::int64_t now_ns) {
    has_passes_ = true;
    trace_.end_step(now_ns);
}

void ServedUses::begin(Pager& pager, PageRequest& request) {
    const MessageHeader& question = request.question;
    if (request.segment) {
        begin_page(pager, *request.segment, question.role, question.page, question.kind == MessageKind::read);
        request.begun = 1;
    }
    for (; request.begun < request.segments.size(); ++request.begun) {
        const std::uint64_t role = request.members[request.begun].role;
        begin_page(pager, *request.segments[request.begun], role, question.page, true);
    }
}

void ServedUses::end(Pager& pager, PageRequest& request) noexcept {
    const MessageHeader& question = request.question;
    for (; request.begun > 0; --request.begun) {
        const std::size_t last = request.begun - 1;
        if (request.segment) {
            end_page(pager, *request.segment, question.role, question.page);
        } else {
            end_page(pager, *request.segments[last], request.members[last].role, question.page);
        }
    }
    request.segment.reset();
    request.segments.clear();
}

/// The segment stays until as many requests for it have ended.
void ServedUses::begin_page(Pager& pager, Segment& segment, std::uint64_t role, std::uint64_t page, bool is_need) {
    const std::int64_t now_ns = activity_now_ns();
    if (is_need) note_need(role, page, now_ns);
    requests_[&segment] += 1;
    if (trace_.has_prediction()) pager.tell_next_use(segment, static_cast<UsePosition>(now_ns));
}

void ServedUses::end_page(Pager& pager, Segment& segment, std::uint64_t role, std::uint64_t page) noexcept {
    const auto found = requests_.find(&segment);
    if (found == requests_.end() || --found->second > 0) return;
    requests_.erase(found);
    const std::int64_t next_ns = next_need_ns(role, page, activity_now_ns());
    if (next_ns > 0) pager.tell_next_use(segment, static_cast<UsePosition>(next_ns));
}

void ServedUses::end_overdue(Pager& pager, Segment& segment, std::int64_t so_long_ns, std::int64_t now_ns) const {
    const auto told_ns = static_cast<std::int64_t>(segment.told_use.load(std::memory_order_relaxed));
    const bool is_overdue = told_ns > 0 && told_ns < now_ns - pass_ns() - so_long_ns;
    if (is_overdue && !requests_.contains(&segment)) pager.tell_next_use(segment, kNever);
}

void ServedUses::note_need(std::uint64_t role, std::uint64_t page, std::int64_t now_ns) {
    if (!has_passes_ || role >= kNoTrace) return;
    auto known = pages_.find(key_of(role, page));
    if (known == pages_.end()) {
        if (pages_.size() == Trace::kMaxUses) return;
        known = pages_.emplace(key_of(role, page), static_cast<TraceId>(pages_.size())).first;
    }
    trace_.touch(known->second, {now_ns, 0});
}

/// What is not in the recording may have been in the client's own memory then: in a pass from now, for all that is
/// known.
std::int64_t ServedUses::next_need_ns(std::uint64_t role, std::uint64_t page, std::int64_t now_ns) const {
    if (!trace_.has_prediction()) return 0;
    const Distance ahead = std::min(distance_to(role, page), distance_to(role, page + 1));
    const std::optional<UpcomingUse> use = ahead == kNever ? std::nullopt : trace_.upcoming(ahead);
    return now_ns + (use ? use->after_ns : pass_ns());
}

Distance ServedUses::distance_to(std::uint64_t role, std::uint64_t page) const {
    const auto known = pages_.find(key_of(role, page));
    if (known == pages_.end()) return kNever;
    return std::min(trace_.next_in_pass(known->second), trace_.first_in_following(known->second));
}

}  // namespace torch_offload
