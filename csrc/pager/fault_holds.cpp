#include "pager/fault_holds.h"

#include <algorithm>

#include "base/units.h"

namespace torch_offload {

std::vector<Page*> FaultHolds::add(Page& page) {
    std::vector<Page*> given_back;
    if (std::ranges::find(pages_, &page) != pages_.end()) {
        given_back.push_back(&page);  // the pin that it has is enough
        return given_back;
    }
    pages_.push_back(&page);
    held_bytes_ += page.segment->page_bytes();
    while (held_bytes_ > most_bytes_ && pages_.size() > 1) {
        held_bytes_ -= pages_.front()->segment->page_bytes();
        given_back.push_back(pages_.front());
        pages_.pop_front();
    }
    return given_back;
}

std::vector<Page*> FaultHolds::take_older_half() {
    const auto end = pages_.begin() + static_cast<std::ptrdiff_t>(divide_up(pages_.size(), std::size_t{2}));
    std::vector<Page*> given_back(pages_.begin(), end);
    pages_.erase(pages_.begin(), end);
    for (const Page* page : given_back) held_bytes_ -= page->segment->page_bytes();
    return given_back;
}

std::vector<Page*> FaultHolds::take(const Segment& segment) {
    std::vector<Page*> given_back;
    std::erase_if(pages_, [&](Page* page) {
        if (page->segment != &segment) return false;
        given_back.push_back(page);
        return true;
    });
    held_bytes_ -= given_back.size() * segment.page_bytes();
    return given_back;
}

}  // namespace torch_offload
