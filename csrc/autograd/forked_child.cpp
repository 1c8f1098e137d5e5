#include "autograd/forked_child.h"

#include <pthread.h>

#include <atomic>

namespace torch_offload {
namespace {

std::atomic<bool> is_child{false};

}  // namespace

void watch_forks() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { is_child.store(true, std::memory_order_relaxed); });
    static_cast<void>(registered);
}

bool in_forked_child() noexcept { return is_child.load(std::memory_order_relaxed); }

}  // namespace torch_offload
