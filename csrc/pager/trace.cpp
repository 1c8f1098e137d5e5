#include "pager/trace.h"

#include <algorithm>

namespace torch_offload {

namespace {

// A role found farther ahead than this is an extra use, not a place to continue from.
constexpr Distance kResyncWindow = 256;

}  // namespace

void Trace::touch(TraceId id) {
    if (id == kNoTrace) return;
    if (recorded_.empty() || recorded_.back() != id) recorded_.push_back(id);
    const Distance ahead = next_in_step(id);
    if (ahead <= kResyncWindow) cursor_ += ahead + 1;
}

void Trace::end_step() {
    if (recorded_.empty()) return;
    predicted_.swap(recorded_);
    recorded_.clear();
    cursor_ = 0;
    for (std::vector<std::uint32_t>& positions : positions_) positions.clear();
    for (std::size_t i = 0; i < predicted_.size(); ++i) {
        const TraceId id = predicted_[i];
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

std::optional<TraceId> Trace::upcoming(std::size_t ahead) const {
    if (predicted_.empty() || ahead >= predicted_.size()) return std::nullopt;
    return predicted_[(cursor_ + ahead) % predicted_.size()];
}

}  // namespace torch_offload
