// What Python's arguments mean for transfers and scratch files. Layer bindings.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "pager/page_store.h"
#include "storage/block_file.h"

namespace torch_offload {

/// A transfer is named in the log before it is late.
inline TransferLimits transfer_limits(std::chrono::seconds io_timeout, const std::vector<int>& retry_delays_ms) {
    TransferLimits limits;
    limits.retry_delays.clear();
    for (const int delay_ms : retry_delays_ms) limits.retry_delays.emplace_back(delay_ms);
    limits.timeout = io_timeout;
    limits.warn_after = std::min(limits.warn_after, limits.timeout / 2);
    return limits;
}

/// Of each directory.
inline std::vector<ScratchLimits> scratch_limits(const std::vector<std::uint64_t>& keep_free_bytes,
                                                 std::optional<std::uint64_t> max_file_bytes) {
    std::vector<ScratchLimits> limits;
    for (const std::uint64_t kept_bytes : keep_free_bytes) {
        limits.push_back({kept_bytes, max_file_bytes.value_or(std::numeric_limits<std::uint64_t>::max())});
    }
    return limits;
}

}  // namespace torch_offload
