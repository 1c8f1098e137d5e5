// Errors of accesses behind the dispatcher, until the program has been told. Layer pager: includes nothing of this
// project.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>

namespace torch_offload {

/// Who is to be told. Called by threads of the engine, without locks; must not throw, nor wait for the program.
struct FaultNotice {
    std::function<void()> kept;                    // Pager::raise_fault_error() has something to raise
    std::function<void(std::exception_ptr)> left;  // by a pager that has ended, of what nobody asked it for
};

/// The last such error. Threads: any.
class FaultErrors {
public:
    explicit FaultErrors(const FaultNotice& notice) : notice_(notice) {}
    ~FaultErrors();
    FaultErrors(const FaultErrors&) = delete;
    FaultErrors& operator=(const FaultErrors&) = delete;

    /// Whether there is an error to raise, or bytes of an access that ended on wrong ones to be taken away.
    bool is_waiting() const noexcept { return is_waiting_.load(std::memory_order_acquire); }
    void keep(std::exception_ptr error) noexcept;
    void tell() const noexcept;
    /// Once such bytes are marked: who took their error before that has not taken them away.
    void marked() noexcept;
    /// Only one caller gets the error; nullptr if it was another.
    std::exception_ptr take() noexcept;

private:
    const FaultNotice& notice_;
    std::mutex mutex_;
    std::exception_ptr error_;
    std::atomic<bool> is_waiting_{false};
};

}  // namespace torch_offload
