#include "pager/pin_lane.h"

#include <utility>

#include "base/engine_thread.h"
#include "pager/stall_clock.h"

namespace torch_offload {
namespace {

void pin_page(Pager& pager, PageRequest& request) noexcept {
    const bool is_read = request.question.kind == MessageKind::read;
    const std::size_t index = request.question.page;
    try {
        pager.touch(request.segment);
        request.guard = pager.pin_pages(request.segment, index, 1, is_read ? Access::read : Access::overwrite);
        request.guard.keep();
        request.bytes = pager.copied_range(*request.segment, index);
    } catch (...) {
        request.error = std::current_exception();
    }
}

}  // namespace

PinLane::PinLane(Pager& pager, const char* thread_name, std::function<void(PageRequests one)> done)
    : pager_(pager), done_(std::move(done)), thread_(engine_thread(thread_name, [this] { run(); })) {}

PinLane::~PinLane() {
    {
        const std::lock_guard lock(mutex_);
        is_ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void PinLane::pin(PageRequests& from) {
    {
        const std::lock_guard lock(mutex_);
        waiting_.splice(waiting_.end(), from, from.begin());
    }
    changed_.notify_one();
}

void PinLane::run() {
    StallClock::ignore_this_thread();
    while (true) {
        PageRequests one;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return is_ending_ || !waiting_.empty(); });
            if (is_ending_) return;
            one.splice(one.begin(), waiting_, waiting_.begin());
        }
        pin_page(pager_, one.front());
        done_(std::move(one));
    }
}

}  // namespace torch_offload
