#include "base/activity_log.h"

#include <unistd.h>

#include <algorithm>

#include "base/check.h"

namespace torch_offload {
namespace {

/// Asks the system once per thread. The fault handler uses it: its memory must be there already.
std::uint32_t current_thread_id() noexcept {
    [[gnu::tls_model("initial-exec")]] thread_local std::uint32_t known = 0;
    if (known == 0) known = static_cast<std::uint32_t>(::gettid());
    return known;
}

}  // namespace

Activity::Activity(ActivityLane a_lane, std::int64_t a_begin_ns, std::int64_t an_end_ns, std::uint64_t a_size_bytes,
                   std::string_view a_label) noexcept
    : begin_ns(a_begin_ns),
      end_ns(an_end_ns),
      size_bytes(a_size_bytes),
      thread_id(current_thread_id()),
      lane(a_lane),
      label_bytes(static_cast<std::uint8_t>(std::min(a_label.size(), kLabelBytes))) {
    std::copy(a_label.end() - label_bytes, a_label.end(), label_text.begin());
}

void ActivityLog::start(std::size_t capacity) {
    OFFLOAD_CHECK(capacity > 0, InvalidArgument, "a log of activities needs room for at least 1, got 0");
    const std::lock_guard lock(start_mutex_);
    OFFLOAD_CHECK(!is_on(), LogicError, "the log of activities was started before");
    memory_ = std::make_unique<Slot[]>(capacity);
    capacity_ = capacity;
    begin_ns_ = activity_now_ns();
    slots_.store(memory_.get(), std::memory_order_release);
}

void ActivityLog::put(const Activity& activity) noexcept {
    Slot* const slots = slots_.load(std::memory_order_acquire);
    const std::uint64_t index = added_count_.fetch_add(1, std::memory_order_relaxed);
    if (index >= capacity_) return;
    slots[index].activity = activity;
    slots[index].is_written.store(true, std::memory_order_release);
}

ActivityRecord ActivityLog::copy() const {
    ActivityRecord record;
    const Slot* const slots = slots_.load(std::memory_order_acquire);
    if (!slots) return record;
    const std::uint64_t added_count = added_count_.load(std::memory_order_relaxed);
    const std::uint64_t there_count = std::min<std::uint64_t>(added_count, capacity_);
    record.begin_ns = begin_ns_;
    record.dropped_count = added_count - there_count;
    record.activities.reserve(there_count);
    for (std::uint64_t i = 0; i < there_count; ++i) {
        if (slots[i].is_written.load(std::memory_order_acquire)) record.activities.push_back(slots[i].activity);
    }
    record.end_ns = activity_now_ns();
    return record;
}

}  // namespace torch_offload
