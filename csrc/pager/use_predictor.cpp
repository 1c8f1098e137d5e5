#include "pager/use_predictor.h"

#include <chrono>
#include <utility>

namespace torch_offload {

void UsePredictor::Held::note_use(TraceId role, std::size_t other_bytes) {
    predictor_.last_ns_ = predictor_.busy_ns();
    predictor_.trace_.touch(role, {predictor_.last_ns_, other_bytes});
}

bool UsePredictor::Held::begin_pass(ProgramId program) {
    const std::int64_t now_ns = predictor_.busy_ns();
    if (!predictor_.trace_.begin_pass(program, now_ns)) return false;
    predictor_.last_ns_ = now_ns;
    ++predictor_.prediction_count_;
    return true;
}

void UsePredictor::Held::end_step() {
    predictor_.last_ns_ = predictor_.busy_ns();
    predictor_.trace_.end_step(predictor_.last_ns_);
    ++predictor_.prediction_count_;
}

void UsePredictor::leave_out(std::shared_ptr<const StallTotals> waits_for_tier) {
    const std::lock_guard lock(mutex_);
    waits_.push_back(std::move(waits_for_tier));
}

/// A clock that stands still while the program waits for a tier.
std::int64_t UsePredictor::busy_ns() const noexcept {
    std::int64_t now_ns = std::chrono::steady_clock::now().time_since_epoch().count();
    for (const std::shared_ptr<const StallTotals>& waits : waits_) now_ns -= static_cast<std::int64_t>(waits->sum_ns());
    return now_ns;
}

}  // namespace torch_offload
