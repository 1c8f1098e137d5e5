#include "autograd/error_bridge.h"

#include <atomic>

namespace torch_offload {
namespace {

std::atomic<ErrorRaiser> current_raiser{nullptr};

}  // namespace

void set_error_raiser(ErrorRaiser raiser) noexcept { current_raiser.store(raiser, std::memory_order_release); }

/// Pre: called while `error` is being handled.
void raise_across_torch(const OffloadError& error) {
    if (const ErrorRaiser raiser = current_raiser.load(std::memory_order_acquire)) raiser(error);
    throw;
}

}  // namespace torch_offload
