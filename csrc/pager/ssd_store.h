// Pages on SSD: extents in a scratch file, checksums, and the thread that owns the I/O engine. Layer pager.
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "base/counters.h"
#include "pager/inquiry.h"
#include "pager/io_arbiter.h"
#include "pager/page_store.h"
#include "pager/rate_meter.h"
#include "pager/read_times.h"
#include "storage/checksum.h"
#include "storage/io_engine.h"
#include "storage/striped_file.h"

namespace torch_offload {

/// Where the latest bytes of a page lie that were written whole, and what they are.
struct StoredPage {
    std::optional<Extent> extent;
    HomePlace home;                         // without an extent
    std::optional<std::uint64_t> checksum;  // of a page in its home: once it was read
    std::uint64_t version = 0;              // of the bytes in the extent
    std::uint64_t last_version = 0;         // that any write had
};

struct Transfer;
/// Transfers move from one list to another without allocating, so none is lost where memory is.
using Transfers = std::list<Transfer>;

/// One page on its way. Keeps its segment alive.
struct Transfer {
    IoRequest request;
    Transfers::iterator self{};  // in whichever list it is
    std::shared_ptr<Segment> segment;
    Page* page = nullptr;
    StoredPage* stored = nullptr;                 // of the page
    std::optional<HomeRead> home_read;            // of a page in its home
    std::optional<Extent> target;                 // of a write: where it goes, to be the page's when it has succeeded
    std::vector<Extent> refused;                  // of a write: where it failed before, one for each retry at most
    std::uint64_t checksum = 0;                   // of a write: of what is written
    std::uint64_t version = 0;                    // of a write: the same
    std::int64_t begin_ns = 0;                    // when it was first submitted
    std::size_t failed_attempts = 0;              // for reasons that may pass
    std::chrono::steady_clock::time_point due{};  // not submitted before
    std::chrono::steady_clock::time_point submitted{};  // or offered to the engine
    bool is_late = false;
    bool is_second_read = false;  // after a checksum mismatch
};

/// Reads pages into frames and verifies them, writes pages, and has the pager look ahead when it has nothing better to
/// do, all on one thread. A page is written to a new extent; the one it had is free once that has succeeded.
class SsdStore final : public PageStore {
public:
    /// `scratch_limits`: of each directory; empty: there are none.
    /// Throws: what StripedFile does.
    SsdStore(std::span<const std::string> directories, std::unique_ptr<IoEngine> engine, TransferLimits limits,
             std::span<const ScratchLimits> scratch_limits = {});
    ~SsdStore() override;

    void start(StoreClient& client) override;
    bool stop() override;
    void read(std::shared_ptr<Segment> segment, Page& page) override;
    void write(std::shared_ptr<Segment> segment, Page& page) override;
    bool set_home(const Page& page, HomePlace home) override;
    void evict(Segment&) override {}
    void forget(Segment& segment) noexcept override;
    void kick() noexcept override;

    StoreStatus status() const noexcept override;
    StoreStatistics statistics() const override;
    std::vector<std::string> describe_transfers(std::size_t most) override;
    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                 bool may_wait) override;

private:
    using Clock = std::chrono::steady_clock;

    void enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page);
    void run();
    void serve();
    void serve_broken(const TierIoError& error);
    void take_queue() noexcept;
    void take_due() noexcept;
    std::chrono::milliseconds longest_wait() const;
    void submit_ready();
    const Transfer* oldest_begun() const;
    bool may_judge(Clock::time_point now) noexcept;
    bool is_stuck();
    void check_ages();
    std::string describe(const Transfer& transfer, Clock::time_point now) const;
    std::string under_way() const;
    std::vector<std::string> describe_oldest(std::size_t most) const;
    void answer_inquiry() noexcept;
    struct ArrivedBytes {
        std::size_t read = 0;
        std::size_t written = 0;
    };
    ArrivedBytes take_finished(std::span<IoRequest* const> finished) noexcept;
    bool settle_one() noexcept;
    void settle_arrived() noexcept;
    IoLoad load() const noexcept;
    std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
    std::size_t reads_in_flight() const noexcept { return reads_in_flight_.load(std::memory_order_relaxed); }

    Transfers& ready(IoDirection direction) noexcept {
        return direction == IoDirection::read ? ready_reads_ : ready_writes_;
    }
    bool prepare(Transfer& transfer) noexcept;
    void prepare_write(Transfer& transfer);
    Extent place_for(const Transfer& transfer);
    void submit_again(Transfers& one) noexcept;
    void settle_read(Transfers& one) noexcept;
    void settle_write(Transfers& one) noexcept;
    bool try_again_later(Transfers& one) noexcept;
    void end(Transfer& transfer, const TransferEnd& end) noexcept;
    void give_up_target(Transfer& transfer) noexcept;
    void end_all(const std::exception& error) noexcept;
    void register_frame(Frame& frame) noexcept;
    void give_back_registered() noexcept;

    StoredPage& stored_page(const Page& page);
    PageIdentity identity_of(const Page& page, std::uint64_t version) const;
    bool is_as_stored(Transfer& transfer) const noexcept;
    void leave_home(StoredPage& stored, std::size_t size_bytes) noexcept;
    std::string place_of(const Transfer& transfer) const;
    bool has_changed_home(const Transfer& transfer) const noexcept;
    std::string failed_read(const Transfer& transfer) const;
    std::exception_ptr read_error(const Transfer& transfer, int error_number) const noexcept;
    std::exception_ptr corruption_error(const Transfer& transfer) const noexcept;
    std::exception_ptr write_error(const Transfer& transfer, const char* why, int error_number) const noexcept;

    StripedFile file_;
    std::uint64_t store_id_;
    const TransferLimits limits_;
    StoreClient* client_ = nullptr;  // from start() on
    std::unique_ptr<IoEngine> engine_;
    std::mutex queue_mutex_;
    Transfers queue_;
    std::mutex stored_mutex_;  // guards which entries there are; one belongs to the page's transfer while there is one
    std::unordered_map<const Page*, StoredPage> stored_;

    // Of its thread only.
    Transfers ready_reads_;
    Transfers ready_writes_;
    Transfers delayed_;    // failed for a reason that may pass, not yet due
    Transfers submitted_;  // the engine's
    Transfers arrived_;    // the engine has done with them, and they are not settled
    IoArbiter arbiter_;
    Clock::time_point last_look_{};                  // at the ages of transfers
    Clock::time_point judge_from_{};                 // not before, that a disk does not answer
    std::optional<Clock::time_point> last_warning_;  // that it does not
    std::minstd_rand jitter_;

    std::atomic<std::size_t> in_flight_{0};  // queued, ready, delayed or submitted
    std::atomic<std::size_t> reads_in_flight_{0};
    RateMeter read_rate_;
    ReadTimes read_times_;  // of each attempt that succeeded, from when the engine had it
    std::atomic<std::size_t> home_bytes_{0};
    Counter retried_reads_, retried_writes_, healed_mismatches_, quarantined_bytes_;
    Inquiry inquiry_;  // what is under way?
    std::atomic<bool> kicked_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace torch_offload
