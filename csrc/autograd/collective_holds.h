// Pins of what collectives use: they end when the collective has, which is later than the call that began it.
// Layer autograd.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pager/pager.h"

namespace torch_offload {

class Engine;

/// The communication library's threads use addresses until a `c10d::Work` has completed, with no kernel of ours above
/// them, in system calls that fail where a page is absent.
/// Threads: any; holds end in the library's.
class CollectiveHolds {
public:
    using Guards = std::vector<PinGuard>;

    CollectiveHolds() = default;
    CollectiveHolds(const CollectiveHolds&) = delete;
    CollectiveHolds& operator=(const CollectiveHolds&) = delete;

    /// Keeps `guards` until the work among the results of a call has completed. Work that tells nobody of its end
    /// (sends and receives of gloo) keeps them until it is gone and sweep() was called. That on buckets of gradients is
    /// waited for, as other ranks are, at the end of the backward pass that began it. Pre: `engine` owns this.
    void hold(const std::shared_ptr<Engine>& engine, c10::ArrayRef<c10::IValue> results, Guards guards, bool is_bucket);

    /// Ends holds whose work is gone. Returns whether there were any.
    bool sweep();

    /// Waits for the end of a hold. Returns false, at once, in a thread that began none (the library's own would wait
    /// for itself) and where no end will come by itself: all processes begin collectives in one order, so those under
    /// way end whatever this one does next; a message may wait for what is next.
    bool wait_for_one();

private:
    struct Hold;
    struct Kept {
        c10::weak_intrusive_ptr<torch::CustomClassHolder> work;
        Guards guards;
    };

    void wait_at_end_of_backward(const std::shared_ptr<Engine>& engine);
    void wait_for_buckets(Pager& pager);
    void note_end(bool is_bucket) noexcept;

    std::mutex mutex_;
    std::condition_variable ended_;
    std::size_t under_way_ = 0;  // holds of collectives
    std::uint64_t ends_ = 0;     // of such holds
    std::size_t buckets_under_way_ = 0;
    int waiting_task_ = -1;  // the backward pass whose end waits for them
    std::vector<Kept> kept_;
};

}  // namespace torch_offload
