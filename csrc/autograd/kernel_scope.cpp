#include "autograd/kernel_scope.h"

#include <ATen/Parallel.h>
#include <c10/core/DispatchKeySet.h>

#include <cstring>

#include "base/check.h"

/// Of the OpenMP runtime that torch itself uses, found through torch's libraries; absent from a build without OpenMP.
/// It sets the number for the calling thread only, which at::set_num_threads does not.
extern "C" [[gnu::weak]] void omp_set_num_threads(int count);

namespace torch_offload {

FloatEnvironment FloatEnvironment::current() noexcept {
    FloatEnvironment result;
    std::fegetenv(&result.environment_);
    return result;
}

std::string FloatEnvironment::to_bytes() const {
    return {reinterpret_cast<const char*>(&environment_), sizeof(environment_)};
}

FloatEnvironment FloatEnvironment::from_bytes(std::string_view bytes) {
    FloatEnvironment result;
    OFFLOAD_CHECK(bytes.size() == sizeof(result.environment_), InvalidArgument, "a floating-point environment of ",
                  bytes.size(), " bytes, not ", sizeof(result.environment_));
    std::memcpy(&result.environment_, bytes.data(), bytes.size());
    return result;
}

void FloatEnvironment::install() const noexcept { std::fesetenv(&environment_); }

KernelScope::KernelScope(const FloatEnvironment& environment, KernelThreads threads)
    : keys_(c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
            c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView),
      former_environment_(FloatEnvironment::current()) {
    environment.install();
    if (threads == KernelThreads::all || omp_set_num_threads == nullptr) return;
    const int count = at::get_num_threads();  // also sets a new thread up, which must not happen later
    if (count <= 1) return;
    omp_set_num_threads(1);
    former_threads_ = count;
}

KernelScope::~KernelScope() {
    if (former_threads_ != 0) omp_set_num_threads(former_threads_);
    former_environment_.install();
}

}  // namespace torch_offload
