// What the pager expects of the program next. Layer pager: includes page_table, trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pager/page_table.h"
#include "pager/trace.h"

namespace torch_offload {

/// A segment that the recording says comes next.
struct Ahead {
    std::shared_ptr<Segment> segment;
    UsePosition use = 0;
    std::int64_t due_ns = 0;    // computing time until then
    std::int64_t slack_ns = 0;  // how long reading it may be put off
};

struct Outlook {
    std::vector<Ahead> segments{};  // in the order of their uses
    std::size_t growth_bytes = 0;   // of other memory, shortly
    std::int64_t margin_ns = 0;     // so long before they have to reads begin
};

}  // namespace torch_offload
