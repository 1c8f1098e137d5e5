// When a client of a store needs its pages next, by what it asked for in passes before. Layer pager: includes trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "pager/request_lane.h"
#include "pager/trace.h"

namespace torch_offload {

/// A recording of what one client has read and had updated here, page by page, by which the pager keeps in memory what
/// is needed soonest. What is written is not needed before it is read. Nothing is recorded of a client that never says
/// where its passes begin or end.
/// Times are steady, in nanoseconds, and given where none is named. Threads: none.
class ServedUses {
public:
    void begin_pass(ProgramId program, std::int64_t now_ns);
    void end_step(std::int64_t now_ns);

    /// The request's pages stay in memory, as far as there is any, until it ends. Throws: std::bad_alloc.
    void begin(Pager& pager, PageRequest& request);
    /// The request has nothing to do with pages any more, if it ever had.
    void end(Pager& pager, PageRequest& request) noexcept;
    /// What the client did not come for when it was to, a pass and so long ago, has no claim on memory.
    void end_overdue(Pager& pager, Segment& segment, std::int64_t so_long_ns, std::int64_t now_ns) const;

    /// The bytes of the page are read or updated now.
    void note_need(std::uint64_t role, std::uint64_t page, std::int64_t now_ns);
    /// When the page, or the one behind it, is needed next; 0 as long as nothing can be said of any.
    std::int64_t next_need_ns(std::uint64_t role, std::uint64_t page, std::int64_t now_ns) const;
    /// How long the pass takes that is thought to run.
    std::int64_t pass_ns() const noexcept { return trace_.pass_ns(); }

private:
    void begin_page(Pager& pager, Segment& segment, std::uint64_t role, std::uint64_t page, bool is_need);
    void end_page(Pager& pager, Segment& segment, std::uint64_t role, std::uint64_t page) noexcept;
    Distance distance_to(std::uint64_t role, std::uint64_t page) const;

    Trace trace_;
    std::unordered_map<std::uint64_t, TraceId> pages_;          // by role and page
    std::unordered_map<const Segment*, std::size_t> requests_;  // that have not ended
    bool has_passes_ = false;
};

}  // namespace torch_offload
