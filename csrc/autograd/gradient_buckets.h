// Memory in which gradients of many parameters are reduced at once, as pages. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "autograd/paged_storage.h"

namespace torch_offload {

/// The buckets of torch's `Reducer`, which makes them in C++ and shows them to nobody. Keeps none of them alive.
/// Threads: any.
class GradientBuckets {
public:
    /// A bucket like a tensor without memory. `is_home`: gradients are views of it, so that it holds them until the
    /// next backward.
    at::Tensor make(const std::shared_ptr<Engine>& engine, const at::Tensor& like, bool is_home);
    /// Whether a bucket has the role.
    bool has(TraceId role);
    /// Gradients were copied out of their buckets: those have no bytes, and are zeros, until they are written again.
    void forget();
    /// All are ordinary memory again; what forget() would leave out is copied. Throws what a pin throws.
    void release();

private:
    struct Bucket {
        c10::weak_intrusive_ptr<c10::StorageImpl> storage;
        TraceId role = kNoTrace;
        std::size_t element_bytes = 0;
        bool is_home = false;
    };
    struct Living {
        c10::Storage storage;
        std::size_t element_bytes = 0;
        bool is_home = false;
    };
    std::vector<Living> living();

    std::mutex mutex_;
    std::vector<Bucket> buckets_;
};

/// While it lives, tensors of floating-point numbers that this thread makes by `empty` are buckets of the engine, if
/// they are large enough to be paged. Operators of this thread arrive at the fallback, whatever their arguments.
class BucketScope {
public:
    BucketScope(std::shared_ptr<Engine> engine, bool is_home);
    ~BucketScope();
    BucketScope(const BucketScope&) = delete;
    BucketScope& operator=(const BucketScope&) = delete;

    /// The scope of this thread, or nullptr.
    static BucketScope* current() noexcept;
    /// Makes what `empty` is asked for.
    void make(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

private:
    const std::shared_ptr<Engine> engine_;
    const bool is_home_;
    BucketScope* const outer_;
    c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace torch_offload
