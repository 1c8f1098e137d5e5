#include "pager/trace.h"

#include <algorithm>
#include <utility>

namespace torch_offload {

namespace {

// A role found this near ahead is where the pass goes on; this near behind, it is used once more.
constexpr Distance kNear = 16;
// After so many roles in a row that are nowhere near, the pass is elsewhere in the recording.
constexpr int kPatience = 8;

}  // namespace

Trace::Trace() : programs_(1) {}

void Trace::touch(TraceId id, const TraceMoment& moment) {
    if (id == kNoTrace) return;
    if (!pass_start_ns_) pass_start_ns_ = moment.busy_ns;  // what was before it, such as loading, was no pass
    if (recorded_.size() == kMaxUses) {
        recorded_ = {};
        is_endless_ = true;
    }
    if (is_endless_) {
        // nothing is kept of it
    } else if (recorded_.empty() || recorded_.back().id != id) {
        recorded_.push_back({id, {moment.busy_ns - *pass_start_ns_, moment.other_bytes}});
    } else {
        recorded_.back().moment.other_bytes = std::max(recorded_.back().moment.other_bytes, moment.other_bytes);
    }
    if (predicted().has(id)) follow(id);
}

void Trace::follow(TraceId id) {
    const Distance ahead = predicted().next(id, cursor_);
    const Distance behind = predicted().last(id, cursor_);
    if (ahead > kNear && behind <= kNear) return;  // once more
    if (ahead > kNear && ++strays_ < kPatience) return;
    strays_ = 0;
    if (ahead != kNever && ahead <= behind) {
        cursor_ += ahead + 1;
    } else if (behind != kNever) {
        cursor_ -= behind - 1;
    }
}

void Trace::expect(ProgramId program, std::span<const TraceId> order) {
    if (has_prediction()) return;
    std::vector<RecordedUse> uses;
    uses.reserve(order.size());
    for (const TraceId id : order) uses.push_back({id, {}});
    programs_[find_or_add(program)].last_pass.replace(uses, 0);
}

bool Trace::begin_pass(ProgramId program, std::int64_t busy_ns) {
    if (has_begun_ && !has_used_any()) return false;
    const bool is_expected = !has_begun_ && programs_[running_].id == program;
    if (has_begun_) end_pass(busy_ns);
    has_begun_ = true;
    if (!is_expected) run(program);
    return !is_expected;
}

void Trace::end_step(std::int64_t busy_ns) {
    has_begun_ = false;
    if (!has_used_any()) return;
    if (!is_training()) run(kTraining);  // what an optimizer's step ends was one, whatever it was taken for
    end_pass(busy_ns);
    run(programs_[running_].follower);
}

/// Of a pass that was too long to be recorded, the one before stays the prediction.
void Trace::end_pass(std::int64_t busy_ns) {
    const std::int64_t pass_ns = busy_ns - *pass_start_ns_;
    pass_start_ns_ = busy_ns;
    last_ended_ = programs_[running_].id;
    if (!std::exchange(is_endless_, false)) programs_[running_].last_pass.replace(recorded_, pass_ns);
    recorded_.clear();
}

void Trace::run(ProgramId program) {
    running_ = find_or_add(program);
    const std::size_t before = last_ended_ ? find(*last_ended_) : programs_.size();
    if (before < programs_.size()) programs_[before].follower = program;
    programs_[running_].began = ++passes_;
    cursor_ = 0;
    strays_ = 0;
}

std::size_t Trace::find(ProgramId program) const noexcept {
    const auto found = std::find_if(programs_.begin(), programs_.end(),
                                    [program](const Program& known) { return known.id == program; });
    return static_cast<std::size_t>(found - programs_.begin());
}

/// A new one takes the place of the one that began longest ago, if there are too many: neither training nor the last.
std::size_t Trace::find_or_add(ProgramId program) {
    std::size_t index = find(program);
    if (index < programs_.size()) return index;
    Program added{program, program, 0, predicted()};
    if (index == kMaxPrograms) {
        const auto oldest = std::min_element(programs_.begin() + 1, programs_.end(),
                                             [](const Program& a, const Program& b) { return a.began < b.began; });
        index = static_cast<std::size_t>(oldest - programs_.begin());
        programs_[index] = std::move(added);
    } else {
        programs_.push_back(std::move(added));
    }
    return index;
}

Distance Trace::first_in_following(TraceId id) const {
    Distance passed = length() - cursor_;
    std::size_t program = running_;
    for (std::size_t hops = 0; hops < programs_.size(); ++hops) {
        program = find(programs_[program].follower);
        if (program == programs_.size()) return kNever;
        const Recording& following = programs_[program].last_pass;
        const Distance first = following.next(id, 0);
        if (first != kNever) return passed + first;
        passed += following.length();
    }
    return kNever;
}

std::optional<UpcomingUse> Trace::upcoming(std::size_t ahead) const {
    const Recording& now = predicted();
    if (now.empty()) return std::nullopt;
    const std::size_t position = cursor_ + ahead;
    const std::int64_t last_ns = cursor_ == 0 ? 0 : now[cursor_ - 1].moment.busy_ns;
    if (position < now.length()) {
        const RecordedUse& use = now[position];
        return UpcomingUse{use.id, use.moment.busy_ns - last_ns, use.moment.other_bytes};
    }
    const std::size_t program = find(programs_[running_].follower);
    if (program == programs_.size()) return std::nullopt;
    const Recording& following = programs_[program].last_pass;
    const std::size_t known = program == running_ ? cursor_ : following.length();
    if (position - now.length() >= known) return std::nullopt;
    const RecordedUse& use = following[position - now.length()];
    return UpcomingUse{use.id, now.pass_ns() + use.moment.busy_ns - last_ns, use.moment.other_bytes};
}

}  // namespace torch_offload
