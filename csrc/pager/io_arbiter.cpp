#include "pager/io_arbiter.h"

#include <algorithm>

#include "base/units.h"

namespace torch_offload {
namespace {

constexpr std::size_t kTrialBytes = 256 * kMiB;
constexpr std::size_t kTrialsOfBest = 7;  // between two of another shape
constexpr double kWeightOfLast = 0.3;     // of a trial in the running mean of its shape
constexpr IoShape kShapes[] = {{8, 4}, {4, 4}, {16, 4}, {8, 16}};

}  // namespace

IoArbiter::IoArbiter(std::size_t capacity) {
    for (const IoShape& shape : kShapes) trials_.push_back({{std::min(shape.depth, capacity), shape.batch}});
}

std::optional<IoDirection> IoArbiter::next(const IoLoad& load) {
    if (load.under_way >= shape().depth || load.waiting_reads + load.waiting_writes == 0) return std::nullopt;
    const IoDirection other = direction_ == IoDirection::read ? IoDirection::write : IoDirection::read;
    const std::size_t waiting = direction_ == IoDirection::read ? load.waiting_reads : load.waiting_writes;
    const std::size_t others = direction_ == IoDirection::read ? load.waiting_writes : load.waiting_reads;
    if (waiting == 0 || (others > 0 && in_a_row_ >= shape().batch)) {
        direction_ = other;
        in_a_row_ = 0;
    }
    ++in_a_row_;
    return direction_;
}

void IoArbiter::note(std::size_t finished_bytes, std::chrono::nanoseconds elapsed, const IoLoad& load) {
    const bool is_saturated = load.under_way >= shape().depth && load.waiting_reads + load.waiting_writes > 0;
    if (!is_saturated) return;
    trial_bytes_ += finished_bytes;
    trial_time_ += elapsed;
    if (trial_bytes_ < kTrialBytes) return;
    const double rate = static_cast<double>(trial_bytes_) / std::chrono::duration<double>(trial_time_).count();
    double& mean = trials_[current_].bytes_per_second;
    mean = mean == 0 ? rate : kWeightOfLast * rate + (1 - kWeightOfLast) * mean;
    trial_bytes_ = 0;
    trial_time_ = {};
    ++finished_trials_;
    current_ = choose();
}

/// Each shape once, then the fastest, with another in turn now and then.
std::size_t IoArbiter::choose() {
    if (finished_trials_ < trials_.size()) return finished_trials_;
    const auto is_slower = [](const Trial& a, const Trial& b) { return a.bytes_per_second < b.bytes_per_second; };
    const auto best = std::max_element(trials_.begin(), trials_.end(), is_slower);
    if (finished_trials_ % (kTrialsOfBest + 1) != 0) return static_cast<std::size_t>(best - trials_.begin());
    retried_ = (retried_ + 1) % trials_.size();
    return retried_;
}

}  // namespace torch_offload
