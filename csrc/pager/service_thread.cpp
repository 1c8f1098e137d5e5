#include <cerrno>
#include <ctime>

#include "base/engine_thread.h"
#include "base/log.h"
#include "pager/pager_impl.h"
#include "pager/shared_budget.h"

namespace torch_offload {
namespace {

constexpr std::int64_t kNsPerSecond = 1'000'000'000;
constexpr std::int64_t kSettleEveryNs = 20'000'000;

}  // namespace

ServiceThread::ServiceThread(Pager::Impl& pager) : pager_(pager) {
    OFFLOAD_CHECK(sem_init(&work_, 0, 0) == 0, OffloadError, "no semaphore: errno ", errno);
}

ServiceThread::~ServiceThread() {
    stop();
    sem_destroy(&work_);
}

void ServiceThread::start() {
    thread_ = engine_thread("to-service", [this] { run(); });
    thread_id_ = thread_.get_id();
}

void ServiceThread::stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    sem_post(&work_);
    thread_.join();
}

/// Async-signal-safe. Pre: the caller set kFaulted, so that a page is in the list at most once.
void ServiceThread::push_fault(Page& page) noexcept {
    Page* head = faults_.load(std::memory_order_relaxed);
    do {
        page.next_fault.store(head, std::memory_order_relaxed);
    } while (!faults_.compare_exchange_weak(head, &page, std::memory_order_release, std::memory_order_relaxed));
    sem_post(&work_);
}

void ServiceThread::push_update(std::weak_ptr<Segment> segment, std::size_t index, UpdateTime time) {
    {
        const std::lock_guard lock(updates_mutex_);
        updates_[static_cast<std::size_t>(time)].emplace_back(std::move(segment), index);
    }
    update_count_.fetch_add(1, std::memory_order_acq_rel);
    if (time == UpdateTime::at_once || may_update()) sem_post(&work_);
}

void ServiceThread::wake() noexcept {
    if (update_count_.load(std::memory_order_acquire) > 0) sem_post(&work_);
}

/// Updates that nobody asked for run only while the program waits: otherwise they would fight its kernels for the
/// cores, and the thread that pins the page applies them with all cores at no more cost. On a device of its own or in
/// the store's own process they are only queued here, and the sooner that is done the sooner their memory is free.
bool ServiceThread::may_update() const noexcept {
    if (pager_.program_waiters.load(std::memory_order_acquire) > 0) return true;
    const bool is_below = pager_.options.updates_below;
    if (!pager_.is_of_device()) return is_below;
    const Device* const device = pager_.options.device;
    return !is_below && device && device->has_own_cores();
}

/// Where processes share a budget, for a moment: others do not say when they want what this one has.
void ServiceThread::wait_for_work() noexcept {
    if (!pager_.shared) {
        while (sem_wait(&work_) != 0) {  // EINTR: a signal handler ran
        }
        return;
    }
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += kSettleEveryNs;
    until.tv_sec += until.tv_nsec / kNsPerSecond;
    until.tv_nsec %= kNsPerSecond;
    while (sem_timedwait(&work_, &until) != 0 && errno == EINTR) {
    }
}

void ServiceThread::run() {
    StallClock::ignore_this_thread();
    while (true) {
        wait_for_work();
        if (pager_.shared) pager_.shared->settle();
        do {
            serve_faults();
            if (stopping_.load(std::memory_order_acquire)) return;
        } while (run_one_update(UpdateTime::at_once) ||
                 (may_update() && run_one_update(UpdateTime::while_program_waits)));
    }
}

void ServiceThread::serve_faults() {
    Page* page = faults_.exchange(nullptr, std::memory_order_acquire);
    while (page) {
        Page* next = page->next_fault.load(std::memory_order_relaxed);
        pager_.serve_fault(*page);
        page = next;
    }
}

/// False if there was none. A failure here is not lost: the page stays pending, and the pin that needs it meets the
/// same error.
bool ServiceThread::run_one_update(UpdateTime time) {
    Update update;
    {
        const std::lock_guard lock(updates_mutex_);
        std::deque<Update>& updates = updates_[static_cast<std::size_t>(time)];
        if (updates.empty()) return false;
        update = std::move(updates.front());
        updates.pop_front();
    }
    update_count_.fetch_sub(1, std::memory_order_acq_rel);
    const std::shared_ptr<Segment> segment = update.first.lock();
    if (!segment) return true;
    Page& page = segment->page(update.second);
    page.clear_flag(PageWord::kUpdateQueued);
    if (!page.load().has(PageWord::kPending)) return true;
    try {
        pager_.resolve_pending(*segment, update.second, false);
        if (is_in_rank_wait()) {
            updates_in_rank_waits_.increment();
            pager_.store->kick();  // what it held is free for the next one
        }
    } catch (const std::exception& error) {
        OFFLOAD_LOG(info, "deferred work ahead of need failed, left to the next use: ", error.what());
    }
    return true;
}

}  // namespace torch_offload
