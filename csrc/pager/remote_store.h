// Pages in another process, on this machine or another one: the client of a PageServer. Layer pager: includes base,
// net.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/counters.h"
#include "net/channel.h"
#include "pager/page_store.h"
#include "pager/rate_meter.h"
#include "storage/wake_event.h"

namespace torch_offload {

/// Pages go from and to their frames without a copy. What was written is known by a version and a checksum here, which
/// what is read must have; it is read twice before it counts as lost, and the store verifies what it is sent. A store
/// that hangs up takes the pages with it: reads end as lost then, writes as not now, and nothing is tried again.
/// Deferred work runs there where the store's kernels give the same bits. Threads: as PageStore. One of its own has the
/// socket, reads, writes and verifies, and has the pager look ahead.
class RemoteStore final : public PageStore {
public:
    /// `page_bytes`: the most that a page of the pager has. `kernels`: what the bits of this side's depend on; empty:
    /// no work is to run there. Throws: TierIoError, which names the store, if nobody answers there within some
    /// seconds, or it refuses.
    RemoteStore(const NetAddress& address, std::size_t page_bytes, std::size_t queue_depth, TransferLimits limits,
                const std::string& kernels = {});
    ~RemoteStore() override;

    void start(StoreClient& client) override;
    bool stop() override;
    void read(std::shared_ptr<Segment> segment, Page& page) override;
    void write(std::shared_ptr<Segment> segment, Page& page) override;
    void evict(Segment&) override {}
    void forget(Segment& segment) noexcept override;
    void kick() noexcept override;
    void begin_pass(ProgramId program) override;
    void end_step() override;

    StoreStatus status() const noexcept override;
    StoreStatistics statistics() const override;
    std::vector<std::string> describe_transfers(std::size_t most) override;
    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                 bool may_wait) override;
    const std::string& name() const noexcept { return name_; }
    /// Of the store's process: two names may lead to one.
    std::uint64_t identity() const noexcept { return identity_; }
    std::size_t budget_bytes() const noexcept { return budget_bytes_; }
    /// Whether there is work that the store runs at all.
    bool runs_work() const noexcept { return max_update_bytes_ > 0; }
    bool runs_work_on(std::span<const std::shared_ptr<Segment>> segments, std::size_t index) const noexcept override;
    void run_work(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, RemoteWork work) override;
    void end_work() noexcept override;

private:
    using Clock = std::chrono::steady_clock;

    /// What is known here of a page's bytes there.
    struct StoredPage {
        std::uint64_t version = 0;  // 0: there are none
        std::uint64_t checksum = 0;
        std::uint64_t last_version = 0;  // that any write had
    };
    struct StoredSegment {
        std::uint64_t id = 0;
        std::size_t stored_bytes = 0;
        std::vector<StoredPage> pages;
    };
    using StoredSegments = std::list<StoredSegment>;

    struct Transfer {
        IoDirection direction = IoDirection::read;
        std::shared_ptr<Segment> segment;
        Page* page = nullptr;
        std::span<std::byte> bytes;  // in the page's frame
        std::uint64_t version = 0;   // of a write
        std::uint64_t checksum = 0;  // of a write
        std::int64_t begin_ns = 0;   // when it was first asked for
        bool is_late = false;
        bool is_second = false;  // after it was damaged on its way
    };
    /// They move from one list to another without allocating.
    using Transfers = std::list<Transfer>;
    /// A request that the store knows of, by its place among all.
    struct Request {
        enum class State : std::uint8_t { none, asked, granted, sent };
        State state = State::none;
        Transfers transfer;
    };

    /// Work on pages that the store is asked to run.
    struct Update {
        std::vector<std::shared_ptr<Segment>> segments;
        std::size_t index = 0;
        RemoteWork work;
        std::vector<MemberPage> members;  // once it is asked for, as the next
        std::vector<std::byte> body;
        bool is_late = false;
    };
    using Updates = std::list<Update>;
    /// Messages of a pass that begins, or a step that has ended.
    using Passes = std::list<MessageHeader>;

    void greet(std::size_t page_bytes, const std::string& kernels);
    void enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page);
    void run();
    void serve();
    void serve_broken(const TierIoError& error);
    void take_queue() noexcept;
    void send_ready();
    bool send_next();
    void enqueue_pass(MessageKind kind, ProgramId program);
    bool send_pass();
    bool send_forgotten();
    bool ask(IoDirection direction);
    bool send_granted();
    bool ask_for_update();
    void describe_members(Update& update);
    Updates take_answered();
    void end_update();
    void end_update_failed();
    void end(Updates one, std::size_t ran, std::exception_ptr error) noexcept;
    void end_all_updates(const TierIoError& error) noexcept;
    std::span<Request> requests_of(IoDirection direction) noexcept;
    MessageHeader header_of(MessageKind kind, const Request& request);
    void receive_arrived();
    void place_body();
    void take_message();
    Request& meant();
    void end_read(Request& request);
    void end_write(Request& request);
    void end_failed(Request& request, TransferStatus status);
    void ask_again(Request& request);
    void end(Transfers& one, const TransferEnd& end) noexcept;
    void end_all(const TierIoError& error) noexcept;
    void check_silence();
    std::string describe(const Transfer& transfer, const std::string& what) const;
    std::string describe(const Update& update, std::string_view what) const;
    std::exception_ptr failure_of(const Update& update, std::string_view what, std::string_view why,
                                  int error_number) const;
    [[noreturn]] void break_off(const char* why) const;
    StoredPage& stored_page(const Transfer& transfer);
    StoredSegment& stored_segment(const Segment& segment);
    void note_stored(const Segment& segment, std::size_t index, std::uint64_t version, std::uint64_t checksum);
    std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }

    const std::string name_;      // in messages
    const std::size_t capacity_;  // requests of one direction at a time
    const TransferLimits limits_;
    Channel channel_;
    std::uint64_t client_id_ = 0;
    std::uint64_t identity_ = 0;
    std::size_t budget_bytes_ = 0;      // of the store
    std::size_t max_update_bytes_ = 0;  // of all pages of one update; 0: there are none
    StoreClient* client_ = nullptr;     // from start() on
    WakeEvent wake_;
    std::mutex queue_mutex_;
    Transfers queue_;
    Updates queued_updates_;
    Passes queued_passes_;
    std::mutex stored_mutex_;  // guards the next three, but not what is known of pages with a transfer
    StoredSegments segments_;
    std::unordered_map<std::uint64_t, StoredSegments::iterator> segment_by_id_;
    StoredSegments forgotten_;  // the store has not been told

    // Of its thread only.
    Transfers waiting_reads_;
    Transfers waiting_writes_;
    std::vector<Request> requests_;  // those of reads, then those of writes
    Updates waiting_updates_;
    Passes waiting_passes_;
    std::vector<Updates> update_requests_;  // that the store knows of, numbered on from the others
    std::array<char, kMaxTextBytes> text_{};
    Clock::time_point last_move_{};                  // of a byte, or when nothing was in flight
    Clock::time_point last_turn_{};                  // of this thread
    std::optional<Clock::time_point> last_warning_;  // that the store is silent

    std::atomic<std::size_t> in_flight_{0};  // in whatever list
    std::atomic<std::size_t> reads_in_flight_{0};
    std::atomic<std::size_t> stored_bytes_{0};
    RateMeter read_rate_;
    Counter retried_reads_, retried_writes_, healed_mismatches_;
    std::atomic<bool> kicked_{false};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> ends_work_{false};
    std::thread thread_;
};

}  // namespace torch_offload
