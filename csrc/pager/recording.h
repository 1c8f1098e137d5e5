// The pins of one pass of a program, in their order, and where in it each role stands. Layer pager: includes base,
// page_table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pager/page_table.h"

namespace torch_offload {

/// A distance into the future, in recorded pins. kNever: no known use.
using Distance = std::uint64_t;
inline constexpr Distance kNever = UINT64_MAX;

/// Where the pass was when a role was pinned.
struct TraceMoment {
    std::int64_t busy_ns = 0;     // time since the start that the program did not spend waiting for the pager
    std::size_t other_bytes = 0;  // the most memory that was not in pages since the pin before
};

/// One pin of the recording.
struct RecordedUse {
    TraceId id = kNoTrace;
    TraceMoment moment;
};

/// A pass that has ended. Immutable but for replace().
/// Threads: none.
class Recording {
public:
    bool empty() const noexcept { return uses_.empty(); }
    std::size_t length() const noexcept { return uses_.size(); }
    const RecordedUse& operator[](std::size_t position) const { return uses_[position]; }
    /// Computing time of the whole pass.
    std::int64_t pass_ns() const noexcept { return pass_ns_; }

    /// How far `id` stands from `position` on; kNever if it does not come again.
    Distance next(TraceId id, std::size_t position) const;
    /// How far `id` stands before `position`: 1 is just before it. kNever if it did not come yet.
    Distance last(TraceId id, std::size_t position) const;
    /// How often `id` stands in the pass.
    std::size_t count(TraceId id) const noexcept { return id < positions_.size() ? positions_[id].size() : 0; }
    bool has(TraceId id) const noexcept { return count(id) > 0; }

    /// Takes the pins, and leaves those that were here in their place, for their memory.
    void replace(std::vector<RecordedUse>& uses, std::int64_t pass_ns);

private:
    std::vector<RecordedUse> uses_;
    std::vector<std::vector<std::uint32_t>> positions_;  // by role
    std::int64_t pass_ns_ = 0;
};

}  // namespace torch_offload
