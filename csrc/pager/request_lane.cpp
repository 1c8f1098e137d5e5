#include "pager/request_lane.h"

#include <utility>

#include "base/engine_thread.h"
#include "pager/stall_clock.h"

namespace torch_offload {

RequestLane::RequestLane(const char* thread_name, std::function<void(PageRequest& request)> serve,
                         std::function<void(PageRequests one)> done)
    : serve_(std::move(serve)), done_(std::move(done)), thread_(engine_thread(thread_name, [this] { run(); })) {}

RequestLane::~RequestLane() {
    {
        const std::lock_guard lock(mutex_);
        is_ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void RequestLane::take(PageRequests& from) {
    {
        const std::lock_guard lock(mutex_);
        waiting_.splice(waiting_.end(), from, from.begin());
    }
    changed_.notify_one();
}

void RequestLane::run() {
    StallClock::ignore_this_thread();
    while (true) {
        PageRequests one;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return is_ending_ || !waiting_.empty(); });
            if (is_ending_) return;
            one.splice(one.begin(), waiting_, waiting_.begin());
        }
        serve_(one.front());
        done_(std::move(one));
    }
}

}  // namespace torch_offload
