// What the program uses, recorded and predicted once for all tiers that hold it. Layer pager: includes base, trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "pager/stall_clock.h"
#include "pager/trace.h"

namespace torch_offload {

/// The trace of a program and the clock of its computing time. The pager whose memory the program uses records, the
/// pager below follows; which segment of its own has a role, and what of it goes first, each knows for itself.
/// Threads: any. Its lock is taken after that of a pager; nothing is locked or waited for under it.
class UsePredictor {
public:
    /// Keeps the recording as it is while it lives.
    class [[nodiscard]] Held {
    public:
        const Trace* operator->() const noexcept { return &predictor_.trace_; }
        /// Changes of the prediction: what was predicted before does not hold any more once this has grown.
        std::uint64_t prediction_count() const noexcept { return predictor_.prediction_count_; }
        /// Computing time since the last use, or since a pass began or ended.
        std::int64_t since_last_ns() const noexcept { return predictor_.busy_ns() - predictor_.last_ns_; }
        /// `other_bytes`: the most memory of the recording tier that was not in pages since the use before.
        void note_use(TraceId role, std::size_t other_bytes);
        /// What a pass that begins later may use, as in Trace.
        void expect(ProgramId program, std::span<const TraceId> order) { predictor_.trace_.expect(program, order); }
        /// False if the prediction stays as it is.
        bool begin_pass(ProgramId program);
        void end_step();

    private:
        friend class UsePredictor;
        explicit Held(UsePredictor& predictor) : predictor_(predictor), lock_(predictor.mutex_) {}

        UsePredictor& predictor_;
        const std::lock_guard<std::mutex> lock_;
    };
    Held hold() { return Held(*this); }

    /// While the program waits for that tier it does not compute.
    void leave_out(std::shared_ptr<const StallTotals> waits_for_tier);

private:
    std::int64_t busy_ns() const noexcept;

    std::mutex mutex_;
    Trace trace_;
    std::vector<std::shared_ptr<const StallTotals>> waits_;  // by tier
    std::int64_t last_ns_ = 0;                               // on the clock of busy_ns()
    std::uint64_t prediction_count_ = 0;
};

}  // namespace torch_offload
