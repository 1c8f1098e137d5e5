// A pager over a disk that finishes transfers when a test lets it. Header only.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "support/gated_engine.h"
#include "support/pager_fixture.h"

namespace torch_offload::test {

/// A pager over a disk that finishes nothing while it is shut, and so looks at the ages of its transfers all the time.
class LatePager {
public:
    explicit LatePager(std::chrono::milliseconds timeout = std::chrono::milliseconds(50), std::size_t budget_pages = 8)
        : disk_(new GatedEngine),
          pager_(std::make_unique<Pager>(with_short_limits(timeout, budget_pages), std::unique_ptr<IoEngine>(disk_))),
          pager(*pager_),
          waker_([this] {
              while (!is_ending_) {
                  disk_->wake();
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
          }) {}
    ~LatePager() {
        if (pager_) disk_->open();
        is_ending_ = true;
        waker_.join();
    }
    /// While the disk is shut.
    void end_pager() { pager_.reset(); }

    GatedEngine& disk() { return *disk_; }

private:
    static PagerOptions with_short_limits(std::chrono::milliseconds timeout, std::size_t budget_pages) {
        PagerOptions options = options_with(budget_pages);
        options.transfer_limits.warn_after = std::chrono::milliseconds(10);
        options.transfer_limits.warn_every = std::chrono::milliseconds(20);
        options.transfer_limits.timeout = timeout;
        return options;
    }

    GatedEngine* disk_;  // the pager's
    std::unique_ptr<Pager> pager_;

public:
    Pager& pager;

private:
    std::atomic<bool> is_ending_{false};
    std::thread waker_;
};

}  // namespace torch_offload::test
