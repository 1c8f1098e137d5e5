// A store for machines without an SSD: keeps pages of clients in one pager's memory and on its SSD.
// Layer pager: includes base, storage, net.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/counters.h"
#include "net/channel.h"
#include "pager/pager.h"
#include "pager/request_lane.h"
#include "pager/served_update.h"
#include "storage/block_file.h"
#include "storage/wake_event.h"

namespace torch_offload {

struct PageServerOptions {
    NetAddress address;                         // to listen at; port 0: one that is free
    PagerOptions pager;                         // but for page_elements: pages are as large as clients make them
    std::vector<ScratchLimits> scratch_limits;  // of each directory; empty: there are none
    RunWork run_work{};                         // of updates; nullptr: there are none
    std::string kernels{};                      // what the bits of those depend on, which a client's must be equal to
};

struct PageServerStatistics {
    PagerStatistics pager;
    std::uint64_t clients = 0;          // now
    std::uint64_t clients_so_far = 0;   // that were welcome
    std::uint64_t segments = 0;         // now
    std::uint64_t received_bytes = 0;   // of pages
    std::uint64_t sent_bytes = 0;       // of pages
    std::uint64_t damaged_bytes = 0;    // of pages that came with another checksum
    std::uint64_t peak_lent_bytes = 0;  // of pages that were being received or sent at one time
    std::uint64_t updates = 0;          // of pages, run for clients
    std::uint64_t update_bytes = 0;     // that said what to run
};

/// Bytes go straight between a socket and a page of the pager, which is pinned meanwhile. So many bytes are pinned for
/// all clients together, at most a quarter of the budget: a client sends a page when it was granted, and others wait in
/// the order in which they came. So memory does not depend on how many there are. When a connection ends, however that
/// is, the client's pages are gone. Memory keeps the pages that clients need soonest, by their passes before. Updates
/// run one at a time, on pages of as many bytes again at most; the pages of those that wait begin to come.
/// Threads: any. One of its own has all sockets and waits for nothing else; one lane pins pages to be read, one those
/// to be written, and one runs updates. The pager has its own.
class PageServer {
public:
    /// Listens from now on. Throws: what listen_at() and the pager's constructor do; InvalidArgument for a budget that
    /// cannot serve any client.
    explicit PageServer(const PageServerOptions& options);
    ~PageServer();
    PageServer(const PageServer&) = delete;
    PageServer& operator=(const PageServer&) = delete;

    const NetAddress& address() const noexcept { return address_; }
    PageServerStatistics statistics() const;

private:
    using Clock = std::chrono::steady_clock;
    using Clients = std::list<ServedClient>;

    void run();
    std::vector<bool> wait();
    void accept_clients();
    void serve(ServedClient& client, bool is_readable) noexcept;
    void receive_from(ServedClient& client);
    void place_body(ServedClient& client);
    void take_message(ServedClient& client);
    void greet(ServedClient& client);
    std::string why_no_updates(const ServedClient& client) const;
    void refuse(ServedClient& client, std::string text);
    void take_question(ServedClient& client);
    PageRequests request_of(ServedClient& client);
    std::shared_ptr<Segment> make_segment(ServedClient& client, const MemberPage& member);
    void find_page(PageRequest& request);
    void take_update(ServedClient& client);
    void find_members(PageRequest& request);
    void answer_update(PageRequests& one) noexcept;
    void take_bytes(ServedClient& client);
    void forget(ServedClient& client, std::uint64_t segment);
    void give_credits();
    void take_pinned();
    void answer(PageRequests& one, MessageKind kind) noexcept;
    void answer_error(PageRequests& one, std::exception_ptr error) noexcept;
    void send_to(ServedClient& client);
    void end_sent(ServedClient& client) noexcept;
    void give_back(PageRequest& request) noexcept;
    void end(PageRequests& requests) noexcept;
    void leave(ServedClient& client) noexcept;
    void drop_stalled();
    void end_overdue();
    void drop_gone();

    const std::size_t max_lent_bytes_;
    const std::chrono::milliseconds patience_;  // with a client that has memory which others wait for
    const RunWork run_work_;
    const std::string kernels_;
    const std::uint64_t identity_;  // by which a client knows one store under two names
    Pager pager_;
    FileDescriptor listening_;
    NetAddress address_;
    WakeEvent wake_;
    std::mutex pinned_mutex_;
    PageRequests pinned_;  // from the lanes

    // Of its thread only.
    Clients clients_;
    PageRequests waiting_;  // for memory
    std::size_t lent_bytes_ = 0;
    std::uint64_t next_client_ = 1;
    Clock::time_point accept_from_{};      // not before
    Clock::time_point look_overdue_at_{};  // again

    Counter clients_so_far_, received_bytes_, sent_bytes_, damaged_bytes_, updates_, update_bytes_;
    std::atomic<std::uint64_t> client_count_{0};
    std::atomic<std::uint64_t> segment_count_{0};
    std::atomic<std::uint64_t> peak_lent_bytes_{0};
    std::atomic<bool> stopping_{false};
    std::optional<RequestLane> reads_;
    std::optional<RequestLane> writes_;
    std::optional<RequestLane> updates_lane_;
    std::thread thread_;
};

}  // namespace torch_offload
