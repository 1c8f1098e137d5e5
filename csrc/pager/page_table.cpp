#include "pager/page_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "base/wait.h"
#include "pager/page_steps.h"
#include "pager/pager_impl.h"

namespace torch_offload {

namespace {

std::atomic<std::uint64_t> illegal_change_count{0};

void note_illegal(PageState from, PageState to) noexcept {
    illegal_change_count.fetch_add(1, std::memory_order_relaxed);
    OFFLOAD_LOG(error, "a page went from state ", static_cast<int>(from), " to state ", static_cast<int>(to),
                ", which is a defect of torch_offload: please report it");
}

}  // namespace

std::uint64_t illegal_changes() noexcept { return illegal_change_count.load(std::memory_order_relaxed); }

bool Page::change(PageWord& expected, PageWord desired) noexcept {
    const PageState before = expected.state();
    const bool changed =
        word.compare_exchange_strong(expected.bits, desired.bits, std::memory_order_acq_rel, std::memory_order_acquire);
    if (!changed) return false;
    wake_all(word);
    if (!is_legal(before, desired.state())) note_illegal(before, desired.state());
    return true;
}

void Page::enter(PageState state, std::uint32_t set_flags, std::uint32_t clear_flags) noexcept {
    PageWord seen = load();
    while (!change(seen, seen.with(state).without_flag(clear_flags).with_flag(set_flags))) {
    }
}

void Page::set_flag(std::uint32_t flag) noexcept {
    word.fetch_or(flag, std::memory_order_acq_rel);
    wake_all(word);
}

void Page::clear_flag(std::uint32_t flag) noexcept {
    word.fetch_and(~flag, std::memory_order_acq_rel);
    wake_all(word);
}

Segment::Segment(Pager& pager, std::span<std::byte> range, std::size_t page_bytes, SegmentKind kind, std::uint64_t id)
    : family(id),
      pager_(pager),
      range_(range),
      page_bytes_(page_bytes),
      kind_(kind),
      id_(id),
      page_count_(divide_up(range.size(), page_bytes)),
      pages_(std::make_unique<Page[]>(page_count_)) {
    OFFLOAD_CHECK(page_bytes % kSectorBytes == 0 && page_bytes > 0, LogicError, "page of ", page_bytes, " bytes");
    for (std::size_t i = 0; i < page_count_; ++i) pages_[i].segment = this;
}

Segment::~Segment() { pager_.impl_->forget(*this); }

std::span<std::byte> Segment::page_range(std::size_t index) const noexcept {
    const std::size_t first = index * page_bytes_;
    return range_.subspan(first, std::min(page_bytes_, range_.size() - first));
}

std::size_t Segment::frame_bytes(std::size_t index) const noexcept {
    return pager_.impl_->whole_granules(page_range(index)).size();
}

void Segment::set_worked_pages(std::size_t count) noexcept {
    worked_pages_.store(count, std::memory_order_relaxed);
    if (const std::shared_ptr<Segment> below = backing()) below->set_worked_pages(count);
}

void Segment::set_backing(std::shared_ptr<Segment> backing) noexcept {
    backing->above_ = pages_;
    backing->set_worked_pages(worked_pages());
    backing_ = std::move(backing);
    has_backing_.store(true, std::memory_order_release);
}

void Segment::assume(SegmentRole role) {
    label = std::move(role.label);
    trace_id = role.trace_id;
    anchor_id = role.anchor_id;
    const TraceId updated_with = role.anchor_id != kNoTrace ? role.anchor_id : role.trace_id;
    if (updated_with != kNoTrace) family = updated_with;
    if (role.is_used_next) keep_for_next_use();
}

void Segment::resolve_fault(std::byte* address, bool is_write) noexcept {
    const std::size_t index = static_cast<std::size_t>(address - range_.data()) / page_bytes_;
    if (index < page_count_) pager_.impl_->answer_fault(pages_[index], is_write);
}

}  // namespace torch_offload
