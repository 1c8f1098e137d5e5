// A list of what was used when, page by page, for whoever asks how well pages were chosen. Layer pager: includes base,
// page_table.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pager/page_table.h"

namespace torch_offload {

/// create: written without being read; drop: its bytes are worthless from here on; pass: one has ended, such as a step.
enum class UseKind : std::uint8_t { read, write, create, drop, pass };

/// One use of `page_count` pages of a segment from `first_page` on.
struct UseEvent {
    std::uint64_t segment_id = 0;
    std::uint64_t first_page = 0;
    std::uint64_t page_count = 0;
    std::uint64_t page_bytes = 0;        // of each page but the last of a segment
    std::uint64_t size_bytes = 0;        // of the segment
    std::uint64_t other_bytes = 0;       // memory that was not in pages just then
    std::uint64_t most_other_bytes = 0;  // since the use before
    UseKind kind = UseKind::read;
};

/// Records while it is switched on; its memory is outside of every budget.
/// Threads: any.
class UseLog {
public:
    bool is_on() const noexcept { return is_on_.load(std::memory_order_relaxed); }
    void switch_on();
    void add(const UseEvent& event) noexcept;
    /// Switches recording off and returns what there is.
    std::vector<UseEvent> take();

private:
    std::atomic<bool> is_on_{false};
    std::mutex mutex_;
    std::vector<UseEvent> events_;
};

}  // namespace torch_offload
