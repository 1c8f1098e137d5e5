// What a pager does at one moment, for a person who wants to know why nothing moves. Layer pager.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "pager/arena.h"
#include "pager/page_table.h"
#include "pager/wait_list.h"

namespace torch_offload {

/// How many pages there are of each sort. A page may be of several but states.
struct PageCounts {
    std::size_t by_state[kPageStateCount] = {};  // by PageState
    std::size_t pinned = 0;
    std::size_t dirty = 0;
    std::size_t pending = 0;          // with deferred work
    std::size_t failed_transfer = 0;  // whose last read failed, or whose transfer is late
};

/// A wait, and which thread that is.
struct ThreadWait {
    ListedWait wait;
    std::string thread_name;  // as the system knows it; empty: it is gone
};

/// Each part is of its own moment: no lock is held for all of them.
struct PagerDump {
    /// What the pager's lock covers: pages, memory. False: somebody had it for as long as was waited for it.
    bool has_locked_part = false;
    PageCounts pages;
    ArenaUsage memory;

    std::size_t moving_pages = 0;  // loading or evicting
    std::size_t late_pages = 0;    // of these
    int memory_waiters = 0;
    int program_waiters = 0;
    int transients = 0;
    std::size_t uses_in_flight = 0;
    std::vector<ThreadWait> waits;       // the oldest first
    std::vector<std::string> transfers;  // the same, as the store describes them
};

}  // namespace torch_offload
