// Recorded, not run: elementwise list operators over managed tensors, applied page by page just before the next read,
// by the stock kernel. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pager/pager.h"

namespace torch_offload {

struct DeferredStatistics {
    std::uint64_t recorded_elements = 0;  // list elements recorded
    std::uint64_t applied_pages = 0;      // operators run on pages, at once or later
    std::uint64_t applied_at_once = 0;    // of those, because every page was in memory already
    std::uint64_t applied_remotely = 0;   // of those, by the store's own process
    std::uint64_t forced_chains = 0;      // recorded work run early because something else needed its order
};

/// The recorder. One per pager; reaches the pager only through latches, and keeps segments (never tensors) alive, so
/// that nothing here ever needs the GIL.
/// Threads: try_record from the training thread; everything else from any.
class DeferredOps {
public:
    /// `torch_device`: of the pager's memory; updates that are applied below it run on the host.
    DeferredOps(std::shared_ptr<Pager> pager, c10::Device torch_device);
    /// Discards what is still recorded, and waits for what the store's process runs. Pre: resolve() is not called any
    /// more, and the pager's clear_pending_work() was.
    ~DeferredOps();
    DeferredOps(const DeferredOps&) = delete;
    DeferredOps& operator=(const DeferredOps&) = delete;

    /// True if `op` is one that may be recorded; decided once per operator and cached by the caller.
    static bool is_recordable(const c10::OperatorHandle& op);

    /// Takes the call on top of `stack` (arguments of `op`) apart. List elements whose tensors are all managed, whole,
    /// dense and of one shape are recorded; pages whose frames are all in memory are updated at once.
    /// Returns true if nothing is left of the call: the arguments are dropped (recordable operators return nothing).
    /// Returns false if something has to run in the ordinary way: the arguments are still there, their lists reduced,
    /// in place, to the elements that were not recorded. These use no storage of a recorded one, so the order between
    /// the two does not matter.
    /// Pre:    is_recordable(op); only autograd and the kernel would see the call.
    /// Throws: what a pin throws, for work that had to be done at once; what was not updated stays recorded.
    bool try_record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

    /// Applies everything recorded for page `index` of `segment` and of the segments updated with it; without
    /// `may_wait` it may still be under way in the store's process. False: gave up.
    /// Throws: what a pin throws; what the kernel throws. Nothing is ever applied twice.
    bool resolve(Segment& segment, std::size_t index, bool may_wait);

    /// Applies everything recorded for the segment, all pages; returns once none is pending.
    void force(const std::shared_ptr<Segment>& segment);
    /// The same for every segment; goes on after a failure and throws the first one at the end.
    void force_all();

    /// Drops a reference to a segment. If that was the last one outside of here to any segment that is updated with
    /// it, their work is discarded and all of them go. For whoever gives up the storage of a segment.
    void release(std::shared_ptr<Segment> segment) noexcept;

    bool has_work(const Segment& segment) const;
    /// The segments updated together with this one, itself included; empty if nothing is recorded for it.
    std::vector<std::shared_ptr<Segment>> members(const Segment& segment) const;
    DeferredStatistics statistics() const;

private:
    struct Impl;
    std::shared_ptr<Pager> pager_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace torch_offload
