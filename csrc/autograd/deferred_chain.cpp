#include "autograd/deferred_chain.h"

#include <algorithm>
#include <utility>

namespace torch_offload {

std::shared_ptr<DeferredChain> DeferredChain::of(const Segment& segment) {
    return std::static_pointer_cast<DeferredChain>(segment.deferred);
}

std::size_t DeferredChain::position_of(const std::shared_ptr<Segment>& segment) {
    const auto found = std::find(members_.begin(), members_.end(), segment);
    if (found != members_.end()) return static_cast<std::size_t>(found - members_.begin());
    members_.push_back(segment);
    released_.reserve(members_.size());  // so that release() cannot fail
    return members_.size() - 1;
}

void DeferredChain::append(const std::shared_ptr<DeferredChain>& self, RecordedOp op,
                           std::span<const std::shared_ptr<Segment>> segments) {
    PlacedOp placed{std::make_shared<const RecordedOp>(std::move(op)), {}};
    for (const std::shared_ptr<Segment>& segment : segments) {
        placed.positions.push_back(self->position_of(segment));
        segment->deferred = self;
    }
    self->operations_.push_back(std::move(placed));
}

PageWork DeferredChain::work_on(std::size_t index) const {
    PageWork work;
    work.operations.assign(operations_.begin() + pages_[index].applied, operations_.end());
    if (work.empty()) return work;
    std::vector<bool> is_used(members_.size());
    for (const PlacedOp& operation : work.operations) {
        for (const std::size_t position : operation.positions) is_used[position] = true;
    }
    std::vector<std::size_t> new_position(members_.size());
    for (std::size_t position = 0; position < members_.size(); ++position) {
        if (!is_used[position] && !members_[position]->page(index).load().has(PageWord::kPending)) continue;
        new_position[position] = work.segments.size();
        work.segments.push_back(members_[position]);
    }
    for (PlacedOp& operation : work.operations) {
        for (std::size_t& position : operation.positions) position = new_position[position];
    }
    return work;
}

bool DeferredChain::is_finished() const noexcept {
    return std::all_of(pages_.begin(), pages_.end(),
                       [&](const PageProgress& page) { return page.applied == operations_.size() && !page.is_taken; });
}

void DeferredChain::release(const Segment& segment) noexcept { released_.push_back(&segment); }

bool DeferredChain::is_released(const Segment& segment) const noexcept {
    return std::find(released_.begin(), released_.end(), &segment) != released_.end();
}

bool DeferredChain::is_unreachable() const noexcept {
    return released_.size() == members_.size() &&
           std::none_of(pages_.begin(), pages_.end(), [](const PageProgress& page) { return page.is_taken; });
}

std::vector<std::shared_ptr<Segment>> DeferredChain::dissolve() noexcept {
    for (const std::shared_ptr<Segment>& member : members_) member->deferred.reset();
    operations_.clear();
    released_.clear();
    for (PageProgress& page : pages_) page.applied = 0;
    return std::exchange(members_, {});
}

}  // namespace torch_offload
