// Recorded, not run: elementwise list operators over managed tensors, applied page by page just before the next read,
// by the stock kernel. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>

#include "pager/pager.h"

namespace torch_offload {

struct DeferredStatistics {
    std::uint64_t recorded_elements = 0;  // list elements recorded
    std::uint64_t applied_pages = 0;      // page updates run, at once or later
    std::uint64_t applied_at_once = 0;    // of those, because every page was in memory already
    std::uint64_t forced_chains = 0;      // recorded work run early because something else needed its order
};

/// The recorder. One per pager; reaches the pager only through claims, and keeps segments (never tensors) alive, so
/// that nothing here ever needs the GIL.
/// Threads: try_record from the training thread; resolve and force from any.
class DeferredOps {
public:
    explicit DeferredOps(std::shared_ptr<Pager> pager);
    ~DeferredOps();

    /// True if `op` is one that may be recorded; decided once per operator and cached by the caller.
    static bool is_recordable(const c10::OperatorHandle& op);

    /// Takes the call on top of `stack` (arguments of `op`) apart. List elements whose tensors are all managed, whole,
    /// dense and of one size and dtype are recorded; pages whose frames are all in memory are updated at once. The
    /// other elements run now through `op` in the ordinary way. On return the stack holds the operator's results
    /// (recordable operators return nothing). Returns false, with the stack untouched, if nothing could be recorded.
    bool try_record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

    /// Applies everything recorded for page `index` of `segment` and of the segments updated with it.
    bool resolve(Segment& segment, std::size_t index, bool may_wait);

    /// Applies everything recorded for the segment, all pages; returns once none is pending.
    void force(const std::shared_ptr<Segment>& segment);
    void force_all();

    bool has_work(const Segment& segment) const;
    DeferredStatistics statistics() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace torch_offload
