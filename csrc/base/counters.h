// What the engine counts: plain monotonic totals that tests and reports read. Layer base.
#pragma once

#include <atomic>
#include <cstdint>

namespace torch_offload {

/// A total that any thread may add to and read.
class Counter {
public:
    void add(std::uint64_t amount) noexcept { value_.fetch_add(amount, std::memory_order_relaxed); }
    void increment() noexcept { add(1); }
    std::uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> value_{0};
};

}  // namespace torch_offload
