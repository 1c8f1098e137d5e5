// The thread that owns the I/O engine: reads pages into frames and verifies them, writes pages and drops their frames,
// and looks ahead when it has nothing better to do. Layer pager.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pager/io_arbiter.h"
#include "pager/page_table.h"
#include "storage/io_engine.h"

namespace torch_offload {

/// One page on its way. Keeps its segment alive.
struct Transfer {
    IoRequest request;
    std::shared_ptr<Segment> segment;
    Page* page = nullptr;
    bool is_second_read = false;  // after a checksum mismatch
};

/// What the mover needs from the pager. All calls come from the mover's thread, without any lock held.
class MoverClient {
public:
    virtual ~MoverClient() = default;
    /// Gives the page an extent and the checksum of its frame; throws TierIoError when the disk is full.
    virtual void prepare_write(Page& page) = 0;
    virtual void finish_read(const std::shared_ptr<Segment>& segment, Page& page) = 0;
    virtual void finish_write(Page& page) = 0;
    virtual void fail_read(Page& page, const std::string& why, int error_number, std::uint64_t offset_bytes) = 0;
    virtual void fail_write(Page& page, const std::string& why, int error_number) = 0;
    virtual bool frame_matches(const Page& page) = 0;
    /// Of the file that the page's extent is in.
    virtual int file_descriptor(const Page& page) = 0;
    /// Registered free frames that are wanted for something else than transfers.
    virtual std::vector<Frame> frames_to_unregister() = 0;
    virtual void take_unregistered(const Frame& frame) = 0;
    virtual bool may_register(std::size_t size_bytes) = 0;
    virtual void note_registered(std::size_t size_bytes) = 0;
    /// Evicts ahead of need and starts reads ahead of use.
    virtual void look_ahead() = 0;
};

/// Threads: read, write and kick may be called from any; the rest happens on the mover's own thread.
class Mover {
public:
    Mover(MoverClient& client, std::unique_ptr<IoEngine> engine);
    ~Mover();
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    /// Starts the thread; the client is called from now on.
    void start();
    /// Ends the thread after what is in flight; the client is not called any more.
    void stop();

    /// Pre: the page is `loading` with a frame and an extent.
    void read(std::shared_ptr<Segment> segment, Page& page);
    /// Pre: the page is `leaving` and its bytes lie in its frame's slot.
    void write(std::shared_ptr<Segment> segment, Page& page);
    /// Asks for look_ahead() and frames_to_unregister().
    void kick() noexcept;

    std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
    std::size_t reads_in_flight() const noexcept { return reads_in_flight_.load(std::memory_order_relaxed); }
    std::size_t capacity() const noexcept { return engine_->capacity(); }
    /// Bytes per second that reads got lately while there were any to make.
    double read_rate() const noexcept { return read_rate_.load(std::memory_order_relaxed); }
    std::string engine_name() const { return engine_->name(); }

private:
    void enqueue(std::unique_ptr<Transfer> transfer);
    void run();
    void take_queue();
    void submit_ready();
    IoLoad load() const noexcept;
    bool prepare(Transfer& transfer);
    void note_reads(std::size_t read_bytes, std::chrono::nanoseconds elapsed);
    void settle_finished(std::unique_ptr<Transfer> transfer);
    void settle_read(std::unique_ptr<Transfer> transfer);
    void give_back_registered();

    MoverClient& client_;
    std::unique_ptr<IoEngine> engine_;
    std::mutex queue_mutex_;
    std::vector<std::unique_ptr<Transfer>> queue_;
    std::deque<std::unique_ptr<Transfer>> ready_reads_;   // mover's thread only
    std::deque<std::unique_ptr<Transfer>> ready_writes_;  // mover's thread only
    IoArbiter arbiter_;                                   // mover's thread only
    std::size_t submitted_ = 0;                           // mover's thread only
    std::atomic<std::size_t> in_flight_{0};               // queued, ready or submitted
    std::atomic<std::size_t> reads_in_flight_{0};
    std::size_t measured_bytes_ = 0;  // of the measurement of the read rate under way; mover's thread only
    std::chrono::nanoseconds measured_time_{0};
    std::atomic<double> read_rate_;
    std::atomic<bool> kicked_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace torch_offload
