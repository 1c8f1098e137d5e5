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

/// Records the pins of one step while predicting from those of the step before. A step that departs from the
/// recording is only predicted worse: repeated uses leave the cursor alone, and after a few roles in a row that are
/// nowhere near it moves to where they are.
/// Threads: none; the pager's lock covers it.
class Trace {
public:
    /// Notes a pin of role `id` and moves the cursor past its next recorded occurrence.
    void touch(TraceId id);

    /// Ends the step: what was recorded becomes the prediction.
    void end_step();

    /// How far ahead `id` is used next in this step; kNever if not in the rest of it.
    Distance next_in_step(TraceId id) const;
    /// How far ahead `id` is first used in the following step; kNever if it is in no recording.
    Distance first_in_following_step(TraceId id) const;

    /// Recorded roles from `ahead` pins after the cursor on; runs into the following step. Empty without a recording.
    std::optional<TraceId> upcoming(std::size_t ahead) const;

    bool has_prediction() const noexcept { return !predicted_.empty(); }
    std::size_t length() const noexcept { return predicted_.size(); }
    std::size_t cursor() const noexcept { return cursor_; }

private:
    void follow(TraceId id);
    Distance last_in_step(TraceId id) const;

    std::vector<TraceId> recorded_;
    std::vector<TraceId> predicted_;
    std::vector<std::vector<std::uint32_t>> positions_;  // by role: where it stands in predicted_
    std::size_t cursor_ = 0;
    int strays_ = 0;
};

}  // namespace torch_offload
