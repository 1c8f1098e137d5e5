// The recorded order of pins, and what it says about the future. Layer pager: includes base, page_table and recording.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pager/recording.h"

namespace torch_offload {

/// A point in the recorded order, counted from the start of the running pass; those that follow it go on counting.
using UsePosition = std::uint64_t;

/// A pin to come.
struct UpcomingUse {
    TraceId id = kNoTrace;
    std::int64_t after_ns = 0;    // computing time from the last pin to this one
    std::size_t other_bytes = 0;  // the most memory not in pages shortly before it
};

/// What runs again and again with much the same uses: a training step, the forward of a model without gradients.
using ProgramId = std::uint64_t;
inline constexpr ProgramId kTraining = 0;

/// Records the pins of one pass of a program while predicting from its pass before, and from that of the program that
/// followed it last time. A pass that is written back from the recording is only predicted worse: repeated uses leave
/// the cursor alone, and after a few roles in a row that are nowhere near it moves to where they are.
/// Threads: none; the predictor's lock covers it.
class Trace {
public:
    /// Pins of a pass that are recorded; what is longer is none, such as a program that never says where one ends.
    static constexpr std::size_t kMaxUses = std::size_t{1} << 20;
    /// Programs whose last pass is kept: of more, the one that began longest ago is forgotten.
    static constexpr std::size_t kMaxPrograms = 16;

    Trace();

    /// Notes a pin of role `id` and moves the cursor past its next recorded occurrence.
    void touch(TraceId id, const TraceMoment& moment = {});

    /// The roles that the program is thought to use, in this order, until a pass has been recorded: all of them at
    /// once, since nothing tells how long it computes in between. Nothing where there is a recording to predict from.
    void expect(ProgramId program, std::span<const TraceId> order);

    /// A pass of the program begins, and the one that ran has ended: what was recorded of it is its prediction now.
    /// What was used between a step and this is the start of this pass. A program without a recording is predicted as
    /// the one before it. False if the prediction stays: the program was expected, or a pass has begun that has used
    /// nothing yet, such as that of a module which calls another one.
    bool begin_pass(ProgramId program, std::int64_t busy_ns = 0);

    /// Ends a training step. What followed it last time is expected to follow it now.
    void end_step(std::int64_t busy_ns = 0);

    /// How far ahead `id` is used next in this pass; kNever if not in the rest of it.
    Distance next_in_pass(TraceId id) const { return predicted().next(id, cursor_); }
    /// Whether the pass uses `id` at one place only, however often there: what is used again at once is noted once.
    bool is_at_one_place(TraceId id) const noexcept { return predicted().count(id) == 1; }
    /// How far ahead `id` is first used in the passes that follow; kNever if it is in none of them.
    Distance first_in_following(TraceId id) const;

    /// The same two as a position that stays true while the cursor moves; kNever if there is neither.
    UsePosition position_of(Distance ahead) const noexcept { return ahead == kNever ? kNever : cursor_ + ahead; }

    /// The pin `ahead` pins after the cursor; runs into the following pass. Empty without a recording.
    std::optional<UpcomingUse> upcoming(std::size_t ahead) const;

    bool has_prediction() const noexcept { return !predicted().empty(); }
    bool is_training() const noexcept { return programs_[running_].id == kTraining; }
    /// Computing time of the pass that is predicted; 0 if it has never run.
    std::int64_t pass_ns() const noexcept { return predicted().pass_ns(); }
    std::size_t length() const noexcept { return predicted().length(); }
    std::size_t cursor() const noexcept { return cursor_; }

    /// Of the running pass: pins that were recorded, and which they were. None in a pass that is too long for it.
    std::size_t recorded_count() const noexcept { return recorded_.size(); }
    TraceId recorded(std::size_t index) const { return recorded_[index].id; }

private:
    struct Program {
        ProgramId id = kTraining;
        ProgramId follower = kTraining;
        std::uint64_t began = 0;  // the passes before it
        Recording last_pass;
    };

    const Recording& predicted() const noexcept { return programs_[running_].last_pass; }
    bool has_used_any() const noexcept { return !recorded_.empty() || is_endless_; }
    void follow(TraceId id);
    void end_pass(std::int64_t busy_ns);
    void run(ProgramId program);
    std::size_t find_or_add(ProgramId program);
    std::size_t find(ProgramId program) const noexcept;

    std::vector<Program> programs_;  // never empty
    std::size_t running_ = 0;
    bool has_begun_ = false;               // the running pass; else it is what is expected after a step
    std::optional<ProgramId> last_ended_;  // before the running one
    std::uint64_t passes_ = 0;

    std::vector<RecordedUse> recorded_;
    bool is_endless_ = false;                    // the pass is too long to be recorded
    std::optional<std::int64_t> pass_start_ns_;  // of the running one; none before the first pin
    std::size_t cursor_ = 0;
    int strays_ = 0;
};

}  // namespace torch_offload
