#include "pager/fault_holds.h"

#include <algorithm>
#include <new>

#include "base/units.h"

namespace torch_offload {

void FaultHolds::add(Page& page) noexcept try {
    if (std::ranges::find(pages_, &page) != pages_.end()) return;
    pages_.push_back(&page);
    page.add_pin();
    held_bytes_ += page.segment->page_bytes();
    while (held_bytes_ > most_bytes_ && pages_.size() > 1) drop_oldest();
} catch (const std::bad_alloc&) {
}

void FaultHolds::drop_oldest() noexcept {
    held_bytes_ -= pages_.front()->segment->page_bytes();
    pages_.front()->drop_pin();
    pages_.pop_front();
}

bool FaultHolds::drop_older_half() noexcept {
    const std::size_t count = divide_up(pages_.size(), std::size_t{2});
    for (std::size_t i = 0; i < count; ++i) drop_oldest();
    return count > 0;
}

bool FaultHolds::drop(const Segment& segment) noexcept {
    const std::size_t count = std::erase_if(pages_, [&](Page* page) {
        if (page->segment != &segment) return false;
        page->drop_pin();
        return true;
    });
    held_bytes_ -= count * segment.page_bytes();
    return count > 0;
}

}  // namespace torch_offload
