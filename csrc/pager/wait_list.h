// Which threads wait for a pager, for what and since when. Layer pager: includes base.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "pager/stall_clock.h"

namespace torch_offload {

struct Page;

/// A wait that was under way when somebody looked.
struct ListedWait {
    StallCause cause = StallCause::read;
    pid_t thread_id = 0;
    std::chrono::nanoseconds age{0};
    std::string page;  // such as "page 3 of weight"; empty: it is not for one page
};

/// The waits under way. Threads: any; entries come and go in the handler of a fault too.
class WaitList {
public:
    /// One wait of the calling thread, while it lives. Allocates nothing.
    class Entry {
    public:
        /// Pre: who waits keeps the page's segment alive.
        Entry(WaitList& list, StallCause cause, const Page* page = nullptr) noexcept;
        ~Entry();
        Entry(const Entry&) = delete;
        Entry& operator=(const Entry&) = delete;

    private:
        friend class WaitList;
        WaitList& list_;
        const StallCause cause_;
        const Page* const page_;
        const pid_t thread_id_;
        const std::chrono::steady_clock::time_point since_;
        Entry* previous_ = nullptr;
        Entry* next_ = nullptr;
    };

    /// All of them, the oldest first.
    std::vector<ListedWait> waits() const;

private:
    /// Atomics and futex waits only. A leaf: who has it takes no other lock and touches no paged memory.
    class Lock {
    public:
        void lock() noexcept;
        void unlock() noexcept;

    private:
        std::atomic<std::uint32_t> is_taken_{0};
    };

    mutable Lock lock_;  // while it is held, no wait ends: pages and labels of entries may be read
    Entry* newest_ = nullptr;
};

}  // namespace torch_offload
