// Pages whose write-back failed: how long each is left alone, and why. Layer pager.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <unordered_map>

namespace torch_offload {

struct Page;

/// Pages that stay in memory because they could not be written. Each is left alone for a while that doubles with every
/// failure, so that others are tried and the disk is not busy with failing.
/// Threads: none; the owner locks.
class UnwritablePages {
public:
    /// A write of the page has failed. Without memory for an entry it is tried again at once, and its error kept.
    void add(const Page& page, std::exception_ptr error, std::int64_t now_ns) noexcept;
    /// The page was written, or is gone.
    void remove(const Page& page) noexcept;
    /// Whether writing the page is not worth trying yet.
    bool is_resting(const Page& page, std::int64_t now_ns) const noexcept;
    bool empty() const noexcept { return pages_.empty(); }
    /// Why the write of one of the pages that `is_meant` is true for failed; nullptr: there is none. All of them are
    /// said now.
    std::exception_ptr error_of(const std::function<bool(const Page&)>& is_meant);
    /// The same of the failures that nobody was told of.
    std::exception_ptr unsaid_error();

private:
    struct Failure {
        std::exception_ptr error;
        std::int64_t until_ns = 0;
        std::int64_t rest_ns = 0;
        bool is_said = false;
    };
    std::unordered_map<const Page*, Failure> pages_;
    std::exception_ptr unlisted_error_;  // until it is said
};

}  // namespace torch_offload
