// Recorded operators over segments that are updated together, in order, and how far each page has got.
// Layer autograd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/recorded_op.h"
#include "pager/page_table.h"

namespace torch_offload {

/// A recorded operator whose members are known by their position in a list of segments.
struct PlacedOp {
    std::shared_ptr<const RecordedOp> op;
    std::vector<std::size_t> positions;
};

/// What is outstanding on one page: operators in order, their positions counting in `segments`.
struct PageWork {
    std::vector<PlacedOp> operations;
    std::vector<std::shared_ptr<Segment>> segments;

    bool empty() const noexcept { return operations.empty(); }
};

/// Owns its segments while work is outstanding: a gradient that the program dropped is still needed. Each of them owns
/// the chain through Segment::deferred; the circle is broken by dissolve().
/// Threads: none; the lock of DeferredOps covers it.
class DeferredChain {
public:
    explicit DeferredChain(std::size_t page_count) : pages_(page_count) {}
    DeferredChain(const DeferredChain&) = delete;
    DeferredChain& operator=(const DeferredChain&) = delete;

    /// The chain that a segment belongs to, or nullptr.
    static std::shared_ptr<DeferredChain> of(const Segment& segment);

    /// Adds an operator for every page; segments that are new to `self` join it.
    /// Pre: none of the segments belongs to another chain; all have the pages of the chain.
    static void append(const std::shared_ptr<DeferredChain>& self, RecordedOp op,
                       std::span<const std::shared_ptr<Segment>> segments);

    const std::vector<std::shared_ptr<Segment>>& members() const noexcept { return members_; }
    std::size_t page_count() const noexcept { return pages_.size(); }
    std::size_t length() const noexcept { return operations_.size(); }

    /// Outstanding operators of the page. The segments are those that they use or whose page waits for work, which is
    /// done when these are.
    PageWork work_on(std::size_t index) const;
    void count_applied(std::size_t index) noexcept { ++pages_[index].applied; }

    /// One thread at a time may advance a page.
    bool is_taken(std::size_t index) const noexcept { return pages_[index].is_taken; }
    void set_taken(std::size_t index, bool is_taken) noexcept {
        pages_[index].is_taken = is_taken;
        pages_[index].late = nullptr;
    }
    /// Why what advances the page takes longer than it may; nullptr: it does not.
    const std::exception_ptr& why_late(std::size_t index) const noexcept { return pages_[index].late; }
    void set_late(std::size_t index, std::exception_ptr why) noexcept { pages_[index].late = std::move(why); }

    bool is_finished() const noexcept;
    /// The program has given up the storage of a member: what is computed for it can never be seen.
    void release(const Segment& segment) noexcept;
    bool is_released(const Segment& segment) const noexcept;
    /// True if the program has given up every member and no page is being advanced.
    bool is_unreachable() const noexcept;
    /// Leaves its segments, with nothing outstanding, and returns them for their last owner to drop without a lock.
    [[nodiscard]] std::vector<std::shared_ptr<Segment>> dissolve() noexcept;

private:
    struct PageProgress {
        std::uint32_t applied = 0;  // operators, from the first
        bool is_taken = false;
        std::exception_ptr late;
    };

    std::size_t position_of(const std::shared_ptr<Segment>& segment);

    std::vector<std::shared_ptr<Segment>> members_;
    std::vector<const Segment*> released_;  // of them
    std::vector<PlacedOp> operations_;
    std::vector<PageProgress> pages_;
};

}  // namespace torch_offload
