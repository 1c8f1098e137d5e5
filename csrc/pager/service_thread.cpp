#include <cerrno>

#include "base/log.h"
#include "pager/pager_impl.h"

namespace torch_offload {

ServiceThread::ServiceThread(Pager::Impl& pager) : pager_(pager) {
    OFFLOAD_CHECK(sem_init(&work_, 0, 0) == 0, OffloadError, "no semaphore: errno ", errno);
}

ServiceThread::~ServiceThread() {
    stop();
    sem_destroy(&work_);
}

void ServiceThread::start() {
    thread_ = std::thread([this] { run(); });
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

void ServiceThread::push_update(std::weak_ptr<Segment> segment, std::size_t index) {
    {
        const std::lock_guard lock(updates_mutex_);
        updates_.emplace_back(std::move(segment), index);
    }
    sem_post(&work_);
}

void ServiceThread::run() {
    while (true) {
        while (sem_wait(&work_) != 0) {  // EINTR: a signal handler ran
        }
        Page* page = faults_.exchange(nullptr, std::memory_order_acquire);
        while (page) {
            Page* next = page->next_fault.load(std::memory_order_relaxed);
            pager_.serve_fault(*page);
            page = next;
        }
        if (stopping_.load(std::memory_order_acquire)) return;
        run_one_update();
    }
}

/// A failure here is not lost: the page stays pending, and the pin that needs it meets the same error.
void ServiceThread::run_one_update() {
    std::pair<std::weak_ptr<Segment>, std::size_t> update;
    {
        const std::lock_guard lock(updates_mutex_);
        if (updates_.empty()) return;
        update = std::move(updates_.front());
        updates_.pop_front();
    }
    const std::shared_ptr<Segment> segment = update.first.lock();
    if (!segment) return;
    Page& page = segment->page(update.second);
    page.clear_flag(PageWord::kUpdateQueued);
    if (!page.load().has(PageWord::kPending)) return;
    try {
        pager_.resolve_pending(*segment, update.second, false);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(info, "deferred work ahead of need failed, left to the next use: ", error.what());
    }
}

}  // namespace torch_offload
