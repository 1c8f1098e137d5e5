// Pages on SSD: extents in a scratch file, checksums, and the thread that owns the I/O engine. Layer pager.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pager/io_arbiter.h"
#include "pager/page_store.h"
#include "pager/rate_meter.h"
#include "storage/checksum.h"
#include "storage/io_engine.h"
#include "storage/striped_file.h"

namespace torch_offload {

/// One page on its way. Keeps its segment alive.
struct Transfer {
    IoRequest request;
    std::shared_ptr<Segment> segment;
    Page* page = nullptr;
    std::int64_t begin_ns = 0;    // when it was first submitted
    bool is_second_read = false;  // after a checksum mismatch
};

/// Reads pages into frames and verifies them, writes pages, and has the pager look ahead when it has nothing better to
/// do, all on one thread.
class SsdStore final : public PageStore {
public:
    /// Throws: what StripedFile does.
    SsdStore(std::span<const std::string> directories, std::unique_ptr<IoEngine> engine);
    ~SsdStore() override;

    void start(StoreClient& client) override;
    void stop() override;
    void read(std::shared_ptr<Segment> segment, Page& page) override;
    void write(std::shared_ptr<Segment> segment, Page& page) override;
    void evict(Segment&) override {}
    void forget(Segment& segment) noexcept override;
    void kick() noexcept override;

    std::size_t reads_in_flight() const noexcept override { return reads_in_flight_.load(std::memory_order_relaxed); }
    std::size_t capacity() const noexcept override { return engine_->capacity(); }
    double read_rate() const noexcept override { return read_rate_.rate(); }
    StoreStatistics statistics() const override;
    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                 bool may_wait) override;
    bool has_in_memory(std::span<const std::shared_ptr<Segment>>, std::size_t) override { return false; }

private:
    void enqueue(IoDirection direction, std::shared_ptr<Segment> segment, Page& page);
    void run();
    void take_queue();
    void submit_ready();
    IoLoad load() const noexcept;
    std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
    bool prepare(Transfer& transfer);
    void prepare_write(Page& page);
    void settle_finished(std::unique_ptr<Transfer> transfer);
    void settle_read(std::unique_ptr<Transfer> transfer);
    PageIdentity identity_of(const Page& page) const;
    bool frame_matches(const Page& page) const;
    std::exception_ptr read_error(const Page& page, int error_number) const;
    std::exception_ptr write_error(const Page& page, const std::string& why, int error_number) const;
    void give_back_registered();

    StripedFile file_;
    std::uint64_t store_id_;
    StoreClient* client_ = nullptr;  // from start() on
    std::unique_ptr<IoEngine> engine_;
    std::mutex queue_mutex_;
    std::vector<std::unique_ptr<Transfer>> queue_;
    std::deque<std::unique_ptr<Transfer>> ready_reads_;   // its thread only
    std::deque<std::unique_ptr<Transfer>> ready_writes_;  // its thread only
    IoArbiter arbiter_;                                   // its thread only
    std::size_t submitted_ = 0;                           // its thread only
    std::atomic<std::size_t> in_flight_{0};               // queued, ready or submitted
    std::atomic<std::size_t> reads_in_flight_{0};
    RateMeter read_rate_;
    std::atomic<bool> kicked_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace torch_offload
