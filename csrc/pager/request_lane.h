// What clients of a store ask for, and a thread that does one kind of it. Layer pager: includes base, net.
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
#include <vector>

#include "net/message.h"
#include "pager/pager.h"

namespace torch_offload {

class ServedClient;

/// What a client asks of one page, or of the pages of an update. A page is pinned from when its lane has had it until
/// its bytes have come or gone.
struct PageRequest {
    ServedClient* client = nullptr;
    MessageHeader question;
    std::shared_ptr<Segment> segment;
    PinGuard guard;
    std::span<std::byte> bytes;  // of the page, while it is pinned
    std::exception_ptr error;    // why it is not, or an update did not begin
    MessageHeader answer;
    std::string text;  // of an answer that is none of bytes

    // Of an update.
    std::vector<std::byte> body;
    std::vector<MemberPage> members;
    std::vector<std::shared_ptr<Segment>> segments;
    std::size_t ran = 0;  // operators

    std::size_t begun = 0;  // of its segments, of which the client's uses know
};
/// They move from one list to another without allocating.
using PageRequests = std::list<PageRequest>;

/// Serves requests one after the other, which may wait for reads and for room.
/// Threads: take() from any; the two functions are called by its own.
class RequestLane {
public:
    /// `serve` does what is asked, and must not throw; `done` is given the request back.
    RequestLane(const char* thread_name, std::function<void(PageRequest& request)> serve,
                std::function<void(PageRequests one)> done);
    ~RequestLane();
    RequestLane(const RequestLane&) = delete;
    RequestLane& operator=(const RequestLane&) = delete;

    /// Takes one request out of the list `from` at its beginning.
    void take(PageRequests& from);

private:
    void run();

    std::function<void(PageRequest& request)> serve_;
    std::function<void(PageRequests one)> done_;
    std::mutex mutex_;  // guards the next two
    PageRequests waiting_;
    bool is_ending_ = false;
    std::condition_variable changed_;
    std::thread thread_;
};

}  // namespace torch_offload
