// What a pager has counted. Layer pager: includes base, device, storage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pager/arena.h"
#include "pager/page_store.h"
#include "pager/page_table.h"
#include "pager/stall_clock.h"

namespace torch_offload {

/// Of a budget that processes share, in bytes of memory; all zero where there are no others.
struct ShareStatistics {
    std::size_t shared_bytes = 0;      // by all of them
    std::size_t equal_bytes = 0;       // that each has where all want as much as they can get
    std::size_t guaranteed_bytes = 0;  // that this one always has
    std::size_t leased_bytes = 0;      // beside that, now
    std::size_t most_leased_bytes = 0;
    std::uint64_t given_back_bytes = 0;  // to others, since the pager began
};

struct PagerStatistics {
    ArenaUsage memory;
    ShareStatistics share;
    StoreStatistics store;
    std::uint64_t read_bytes[kSegmentKindCount] = {};
    std::uint64_t written_bytes[kSegmentKindCount] = {};
    std::uint64_t pins = 0;    // page pins
    std::uint64_t misses = 0;  // page pins that had to wait for a read
    std::uint64_t faults = 0;  // accesses behind the dispatcher
    std::uint64_t evictions = 0;
    std::uint64_t clean_drops = 0;  // evictions without I/O
    std::uint64_t prefetches = 0;   // pages read ahead of use
    std::uint64_t stall_ns[kStallCauseCount] = {};
    std::uint64_t updates_in_rank_waits = 0;  // pages whose deferred work ran while the program waited for other ranks
    std::uint64_t own_update_ns = 0;          // in which threads of the program applied deferred work themselves
};

}  // namespace torch_offload
