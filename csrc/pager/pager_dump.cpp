#include "pager/pager_dump.h"

#include <chrono>
#include <fstream>
#include <mutex>
#include <thread>

#include "pager/pager_impl.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxTransfers = 8;
constexpr std::chrono::milliseconds kLockPatience{1'000};
constexpr std::chrono::milliseconds kLockPause{1};

void count(PageCounts& counts, PageWord word) {
    ++counts.by_state[static_cast<std::size_t>(word.state())];
    counts.pinned += word.pin_count() != 0;
    counts.dirty += word.has(PageWord::kDirty);
    counts.pending += word.has(PageWord::kPending);
    counts.failed_transfer += word.has(PageWord::kTransferFailed);
}

/// Empty: somebody else has it all the time.
std::unique_lock<std::mutex> lock_patiently(std::mutex& mutex) {
    const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
    std::unique_lock lock(mutex, std::try_to_lock);
    while (!lock && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kLockPause);
        static_cast<void>(lock.try_lock());
    }
    return lock;
}

/// A segment leaves the list under the lock before its pages go, so that nobody has to own it here.
bool read_locked_part(Pager::Impl& pager, PagerDump& dump) {
    const std::unique_lock lock = lock_patiently(pager.mutex);
    if (!lock) return false;
    dump.memory = pager.arena.usage();
    for (const auto& [segment, owner] : pager.segments) {
        for (std::size_t i = 0; i < segment->page_count(); ++i) count(dump.pages, segment->page(i).load());
    }
    return true;
}

std::string name_of_thread(pid_t thread_id) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread_id) + "/comm");
    std::string name;
    std::getline(file, name);
    return name;
}

}  // namespace

PagerDump Pager::dump() {
    PagerDump dump;
    for (ListedWait& wait : impl_->waits.waits()) {
        std::string name = name_of_thread(wait.thread_id);
        dump.waits.push_back({std::move(wait), std::move(name)});
    }
    dump.moving_pages = impl_->moving_pages.load(std::memory_order_acquire);
    dump.late_pages = impl_->late_pages.load(std::memory_order_acquire);
    dump.memory_waiters = impl_->memory_waiters.load(std::memory_order_acquire);
    dump.program_waiters = impl_->program_waiters.load(std::memory_order_acquire);
    dump.transients = impl_->transients.load(std::memory_order_acquire);
    dump.uses_in_flight = impl_->uses.count();
    dump.transfers = impl_->store->describe_transfers(kMaxTransfers);
    dump.has_locked_part = read_locked_part(*impl_, dump);
    return dump;
}

}  // namespace torch_offload
