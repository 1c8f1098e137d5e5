// The process's memory, whose calls of one kind wait for a test. Header only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/check.h"
#include "device/address_space.h"

namespace torch_offload::test {

/// Threads: any.
class GatedMemory : public Memory {
public:
    enum class Call : std::uint8_t { none, release, commit, move };  // decommitting is releasing

    /// The next call of that kind waits, and those that come meanwhile, until open().
    void shut(Call call) {
        const std::lock_guard lock(mutex_);
        shut_ = call;
    }
    void open() {
        const std::lock_guard lock(mutex_);
        shut_ = Call::none;
        changed_.notify_all();
    }
    /// Returns once a call waits; false after ten seconds.
    bool comes_to_wait() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::seconds(10), [this] { return waiting_ > 0; });
    }
    /// The next call of that kind that goes on fails, with all memory where it was. Not for release.
    void refuse_one(Call call) {
        const std::lock_guard lock(mutex_);
        refused_ = call;
    }

    std::size_t granularity_bytes() const noexcept override { return memory_.granularity_bytes(); }
    std::span<std::byte> reserve(std::size_t size_bytes, FaultTarget* target) override {
        return memory_.reserve(size_bytes, target);
    }
    void set_target(std::span<std::byte> range, FaultTarget* target) override { memory_.set_target(range, target); }
    void release(std::span<std::byte> range) noexcept override {
        static_cast<void>(pass(Call::release));
        memory_.release(range);
    }
    void commit(std::span<std::byte> range, HugePages huge_pages) override {
        OFFLOAD_CHECK(pass(Call::commit), OutOfTierMemory, "refused");
        memory_.commit(range, huge_pages);
    }
    void decommit(std::span<std::byte> range) override {
        static_cast<void>(pass(Call::release));
        memory_.decommit(range);
    }
    void move(std::span<std::byte> from, std::byte* to, Protection protection) override {
        OFFLOAD_CHECK(pass(Call::move), OutOfTierMemory, "refused");
        memory_.move(from, to, protection);
    }
    void protect(std::span<std::byte> range, Protection protection) override { memory_.protect(range, protection); }
    void hide_from_fork(std::span<std::byte> range, bool hidden) override { memory_.hide_from_fork(range, hidden); }
    void poison(std::span<std::byte> range) noexcept override { memory_.poison(range); }
    void fill_zero(std::span<std::byte> range) override { memory_.fill_zero(range); }

private:
    /// Waits where that is shut; returns false where it is refused.
    bool pass(Call call) {
        std::unique_lock lock(mutex_);
        ++waiting_;
        if (shut_ == call) changed_.notify_all();
        changed_.wait(lock, [&] { return shut_ != call; });
        --waiting_;
        if (refused_ != call) return true;
        refused_ = Call::none;
        return false;
    }

    Memory& memory_ = AddressSpace::process();
    std::mutex mutex_;
    std::condition_variable changed_;
    Call shut_ = Call::none;
    int waiting_ = 0;
    Call refused_ = Call::none;
};

}  // namespace torch_offload::test
