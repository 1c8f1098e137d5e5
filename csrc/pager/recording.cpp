#include "pager/recording.h"

#include <algorithm>
#include <iterator>

namespace torch_offload {

Distance Recording::next(TraceId id, std::size_t position) const {
    if (!has(id)) return kNever;
    const std::vector<std::uint32_t>& positions = positions_[id];
    const auto next = std::lower_bound(positions.begin(), positions.end(), position);
    return next == positions.end() ? kNever : *next - position;
}

Distance Recording::last(TraceId id, std::size_t position) const {
    if (!has(id)) return kNever;
    const std::vector<std::uint32_t>& positions = positions_[id];
    const auto next = std::lower_bound(positions.begin(), positions.end(), position);
    return next == positions.begin() ? kNever : position - *std::prev(next);
}

void Recording::replace(std::vector<RecordedUse>& uses, std::int64_t pass_ns) {
    pass_ns_ = pass_ns;
    uses_.swap(uses);
    for (std::vector<std::uint32_t>& positions : positions_) positions.clear();
    for (std::size_t i = 0; i < uses_.size(); ++i) {
        const TraceId id = uses_[i].id;
        if (id >= positions_.size()) positions_.resize(id + 1);
        positions_[id].push_back(static_cast<std::uint32_t>(i));
    }
}

}  // namespace torch_offload
