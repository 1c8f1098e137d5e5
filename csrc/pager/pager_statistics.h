// What a pager has counted. Layer pager: includes base, device, storage.
#pragma once

#include <cstdint>

#include "pager/arena.h"
#include "pager/page_store.h"
#include "pager/page_table.h"
#include "pager/stall_clock.h"

namespace torch_offload {

struct PagerStatistics {
    ArenaUsage memory;
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
