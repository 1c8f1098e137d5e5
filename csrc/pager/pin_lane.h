// Pages that clients of a store ask for, and a thread that pins them for them. Layer pager: includes base, net.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "net/message.h"
#include "pager/pager.h"

namespace torch_offload {

class ServedClient;

/// What a client asks of one page. The page is pinned from when the lane has had it until its bytes have come or gone.
struct PageRequest {
    ServedClient* client = nullptr;
    MessageHeader question;
    std::shared_ptr<Segment> segment;
    PinGuard guard;
    std::span<std::byte> bytes;  // of the page, while it is pinned
    std::exception_ptr error;    // why it is not
    MessageHeader answer;
    std::string text;  // of an answer that is none of bytes
};
/// They move from one list to another without allocating.
using PageRequests = std::list<PageRequest>;

/// Pins pages one after the other, which may wait for reads and for room.
/// Threads: pin() from any; `done` is called by its own.
class PinLane {
public:
    /// `done`: is given each request, with its page pinned or an error. The pager outlives the lane.
    PinLane(Pager& pager, const char* thread_name, std::function<void(PageRequests one)> done);
    ~PinLane();
    PinLane(const PinLane&) = delete;
    PinLane& operator=(const PinLane&) = delete;

    /// Takes one request out of the list `from` at its beginning. Pre: it has a segment.
    void pin(PageRequests& from);

private:
    void run();

    Pager& pager_;
    std::function<void(PageRequests one)> done_;
    std::mutex mutex_;  // guards the next two
    PageRequests waiting_;
    bool is_ending_ = false;
    std::condition_variable changed_;
    std::thread thread_;
};

}  // namespace torch_offload
