#include "pager/trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_offload {

namespace {

// A role found this near ahead is where the step goes on; this near behind, it is used once more.
constexpr Distance kNear = 16;
// After so many roles in a row that are nowhere near, the step is elsewhere in the recording.
constexpr int kPatience = 8;

}  // namespace

void Trace::touch(TraceId id, const TraceMoment& moment) {
    if (id == kNoTrace) return;
    if (recorded_.size() == kMaxUses) {
        recorded_ = {};
        is_endless_ = true;
    }
    if (is_endless_) {
        // nothing is kept of it
    } else if (recorded_.empty() || recorded_.back().id != id) {
        recorded_.push_back({id, {moment.busy_ns - step_start_ns_, moment.other_bytes}});
    } else {
        recorded_.back().moment.other_bytes = std::max(recorded_.back().moment.other_bytes, moment.other_bytes);
    }
    if (id < positions_.size()) follow(id);
}

void Trace::follow(TraceId id) {
    const Distance ahead = next_in_step(id);
    const Distance behind = last_in_step(id);
    if (ahead > kNear && behind <= kNear) return;  // once more
    if (ahead > kNear && ++strays_ < kPatience) return;
    strays_ = 0;
    if (ahead != kNever && ahead <= behind) {
        cursor_ += ahead + 1;
    } else if (behind != kNever) {
        cursor_ -= behind - 1;
    }
}

/// How far behind the cursor `id` was used last: 1 is just before it.
Distance Trace::last_in_step(TraceId id) const {
    const std::vector<std::uint32_t>& positions = positions_[id];
    const auto next = std::lower_bound(positions.begin(), positions.end(), cursor_);
    return next == positions.begin() ? kNever : cursor_ - *std::prev(next);
}

void Trace::end_step(std::int64_t busy_ns) {
    const bool is_empty = recorded_.empty() && !is_endless_;
    if (is_empty) return;
    const std::int64_t step_ns = busy_ns - step_start_ns_;
    step_start_ns_ = busy_ns;
    cursor_ = 0;
    strays_ = 0;
    if (std::exchange(is_endless_, false)) return;  // the prediction stays the one before
    step_ns_ = step_ns;
    predicted_.swap(recorded_);
    recorded_.clear();
    for (std::vector<std::uint32_t>& positions : positions_) positions.clear();
    for (std::size_t i = 0; i < predicted_.size(); ++i) {
        const TraceId id = predicted_[i].id;
        if (id >= positions_.size()) positions_.resize(id + 1);
        positions_[id].push_back(static_cast<std::uint32_t>(i));
    }
}

Distance Trace::next_in_step(TraceId id) const {
    if (id >= positions_.size()) return kNever;
    const std::vector<std::uint32_t>& positions = positions_[id];
    const auto next = std::lower_bound(positions.begin(), positions.end(), cursor_);
    return next == positions.end() ? kNever : *next - cursor_;
}

Distance Trace::first_in_following_step(TraceId id) const {
    if (id >= positions_.size() || positions_[id].empty()) return kNever;
    return predicted_.size() - cursor_ + positions_[id].front();
}

std::optional<UpcomingUse> Trace::upcoming(std::size_t ahead) const {
    if (predicted_.empty() || ahead >= predicted_.size()) return std::nullopt;
    const std::size_t position = cursor_ + ahead;
    const bool is_following = position >= predicted_.size();
    const Use& use = predicted_[is_following ? position - predicted_.size() : position];
    const std::int64_t last_ns = cursor_ == 0 ? 0 : predicted_[cursor_ - 1].moment.busy_ns;
    const std::int64_t at_ns = use.moment.busy_ns + (is_following ? step_ns_ : 0);
    return UpcomingUse{use.id, at_ns - last_ns, use.moment.other_bytes};
}

}  // namespace torch_offload
