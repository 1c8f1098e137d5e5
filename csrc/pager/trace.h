// The recorded order of pins, and what it says about the future. Layer pager: includes base and page_table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pager/page_table.h"

namespace torch_offload {

/// A distance into the future, in recorded pins. kNever: no known use.
using Distance = std::uint64_t;
inline constexpr Distance kNever = UINT64_MAX;

/// A point in the recorded order, counted from the start of the running step; the following step goes on counting.
using UsePosition = std::uint64_t;

/// Where the step was when a role was pinned.
struct TraceMoment {
    std::int64_t busy_ns = 0;     // time since the start that the program did not spend waiting for the pager
    std::size_t other_bytes = 0;  // the most memory that was not in pages since the pin before
};

/// A pin to come.
struct UpcomingUse {
    TraceId id = kNoTrace;
    std::int64_t after_ns = 0;    // computing time from the last pin to this one
    std::size_t other_bytes = 0;  // the most memory not in pages shortly before it
};

/// Records the pins of one step while predicting from those of the step before. A step that is written back from the
/// recording is only predicted worse: repeated uses leave the cursor alone, and after a few roles in a row that are
/// nowhere near it moves to where they are.
/// Threads: none; the predictor's lock covers it.
class Trace {
public:
    /// Pins of a step that are recorded; what is longer is none, such as a program that only generates.
    static constexpr std::size_t kMaxUses = std::size_t{1} << 20;

    /// Notes a pin of role `id` and moves the cursor past its next recorded occurrence.
    void touch(TraceId id, const TraceMoment& moment = {});

    /// Ends the step: what was recorded becomes the prediction.
    void end_step(std::int64_t busy_ns = 0);

    /// How far ahead `id` is used next in this step; kNever if not in the rest of it.
    Distance next_in_step(TraceId id) const;
    /// How far ahead `id` is first used in the following step; kNever if it is in no recording.
    Distance first_in_following_step(TraceId id) const;

    /// The same two as a position that stays true while the cursor moves; kNever if there is neither.
    UsePosition position_of(Distance ahead) const noexcept { return ahead == kNever ? kNever : cursor_ + ahead; }

    /// The pin `ahead` pins after the cursor; runs into the following step. Empty without a recording.
    std::optional<UpcomingUse> upcoming(std::size_t ahead) const;

    bool has_prediction() const noexcept { return !predicted_.empty(); }
    std::size_t length() const noexcept { return predicted_.size(); }
    std::size_t cursor() const noexcept { return cursor_; }

    /// Of the running step: pins that were recorded, and which they were. None in a step that is too long for it.
    std::size_t recorded_count() const noexcept { return recorded_.size(); }
    TraceId recorded(std::size_t index) const { return recorded_[index].id; }

private:
    void follow(TraceId id);
    Distance last_in_step(TraceId id) const;

    struct Use {
        TraceId id;
        TraceMoment moment;
    };

    std::vector<Use> recorded_;
    bool is_endless_ = false;  // the step is too long to be recorded
    std::vector<Use> predicted_;
    std::int64_t step_start_ns_ = 0;                     // of the running step
    std::int64_t step_ns_ = 0;                           // computing time of the predicted one
    std::vector<std::vector<std::uint32_t>> positions_;  // by role: where it stands in predicted_
    std::size_t cursor_ = 0;
    int strays_ = 0;
};

}  // namespace torch_offload
