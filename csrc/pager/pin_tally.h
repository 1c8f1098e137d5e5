// Who has pages pinned for a moment: what others wait for rather than run out of memory. Layer pager: includes nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace torch_offload {

/// Counts pages that guards of operators hold, and finds out whether some of them will be let go: by another thread,
/// and one that does not wait itself for what has not come to pass.
/// Threads: any. What begins and ends with every pin takes no lock.
class PinTally {
public:
    /// What holds pages: an access, whose pages are counted as pinned, or an update of them.
    enum class Holder : bool { access, update };

    /// Pages that the calling thread pins for a moment. Move-only; an empty share holds nothing. Ends on the thread
    /// that it began on, which would be taken to have it for good otherwise.
    class [[nodiscard]] Share {
    public:
        Share() noexcept = default;
        Share(PinTally& tally, std::size_t page_count, Holder holder = Holder::access) noexcept;
        Share(Share&& other) noexcept { swap(other); }
        Share& operator=(Share other) noexcept {
            swap(other);
            return *this;
        }
        ~Share();
        void swap(Share& other) noexcept {
            std::swap(tally_, other.tally_);
            std::swap(thread_, other.thread_);
            std::swap(page_count_, other.page_count_);
        }

    private:
        PinTally* tally_ = nullptr;
        const void* thread_ = nullptr;
        std::size_t page_count_ = 0;
    };

    /// The calling thread lets nothing go before `word` is another one than `seen`.
    class Wait {
    public:
        Wait(PinTally& tally, const std::atomic<std::uint32_t>& word, std::uint32_t seen);
        ~Wait();
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;

    private:
        friend class PinTally;
        PinTally& tally_;
        const std::atomic<std::uint32_t>& word_;
        const std::uint32_t seen_;
        const std::size_t page_count_;
        Wait* next_ = nullptr;
    };

    /// The same until an access of the thread's has been answered. Async-signal-safe.
    class Fault {
    public:
        explicit Fault(PinTally& tally) noexcept;
        ~Fault();
        Fault(const Fault&) = delete;
        Fault& operator=(const Fault&) = delete;

    private:
        PinTally& tally_;
        const std::size_t page_count_;
    };

    /// Whether other threads hold pages that they will let go without the caller's doing. One that has just let go may
    /// still count: who waits for it looks again after a while.
    bool has_others() const;
    /// Pages in all shares of accesses that there ever were.
    std::uint64_t accessed() const noexcept {
        const std::uint64_t updated = updated_.load(std::memory_order_acquire);  // first: no more than have begun
        return begun_.load(std::memory_order_relaxed) - updated;
    }

private:
    std::size_t own_count() const noexcept;

    std::atomic<std::uint64_t> begun_{0};
    std::atomic<std::uint64_t> updated_{0};  // of these, pages in shares of updates
    std::atomic<std::uint64_t> ended_{0};
    std::atomic<std::size_t> faulting_{0};
    mutable std::mutex mutex_;  // guards the next; a leaf
    Wait* waits_ = nullptr;     // of threads that hold something
};

}  // namespace torch_offload
