// The segments that callers of prefetch() requested. Layer pager: includes base, page_table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "pager/page_table.h"

namespace torch_offload {

/// Requests of callers of prefetch(), in their order, which is taken for the order of uses. A request waits until its
/// segment is read, and stays outstanding until the segment is used, or one that was requested later. Of several for
/// one segment the last counts.
/// Threads: none; the pager's lock covers it. Owners are handed out, since the end of the last one takes that lock.
class PrefetchQueue {
public:
    using Owners = std::vector<std::shared_ptr<Segment>>;

    /// Adds one. `now`: later than all before, and more than 0. Where there are too many, the oldest ends.
    void add(const std::shared_ptr<Segment>& segment, std::uint64_t now, Owners& ended);
    struct Next {
        std::shared_ptr<Segment> segment;  // or nullptr
        std::size_t bytes_before = 0;      // of those that are outstanding before it
    };
    /// The oldest that waits and still holds.
    Next next(Owners& passed);
    /// It does not wait any longer. Pre: next() has just returned it.
    void read(const std::shared_ptr<Segment>& segment);
    /// Ends those given at `time` or before; `ended` gets their segments, most of which are not outstanding any more.
    void end(std::uint64_t time, Owners& ended);

private:
    struct Request {
        std::weak_ptr<Segment> segment;
        std::size_t size_bytes;
        std::uint64_t time;
    };
    std::size_t bytes_before(std::uint64_t time) const noexcept;

    std::deque<Request> waiting_;
    std::deque<Request> holding_;
};

}  // namespace torch_offload
