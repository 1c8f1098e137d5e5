// Pages of a device whose memory is short live in the memory of the host, and there in a pager of their own.
// Layer pager: includes base, device.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device/stream.h"
#include "pager/page_store.h"
#include "pager/pager.h"
#include "pager/rate_meter.h"

namespace torch_offload {

/// The store of a device's pager: each of its segments has a backing segment in the pager below, made when a page of it
/// first leaves. A page goes down as a pin for overwriting and a copy, and comes back as a pin for reading and a copy;
/// whether the pager below has it in memory or on SSD is its own affair, and so is what it reads ahead, by what is
/// recorded above.
/// Threads: as PageStore. One per direction waits for pins below and for copies, one looks ahead. The pager below, the
/// device and this store are destroyed in the reverse order: the store first.
class TierStore final : public PageStore {
public:
    /// Pre: `below` has pages of as many elements as the pager above.
    /// Throws: InvalidArgument if its budget is too small to feed a device.
    /// `activations_stay`: those that come down are not sent further.
    TierStore(Pager& below, Device& device, bool activations_stay = false);
    ~TierStore() override;

    void start(StoreClient& client) override;
    bool stop() override;
    void read(std::shared_ptr<Segment> segment, Page& page) override;
    void write(std::shared_ptr<Segment> segment, Page& page) override;
    void evict(Segment& segment) override;
    void forget(Segment&) noexcept override {}  // the backing segment ends with it
    void kick() noexcept override;
    void begin_pass(ProgramId program) override { below_.begin_pass(program); }
    void end_step() override { below_.end_step(); }

    StoreStatus status() const noexcept override;
    StoreStatistics statistics() const override;
    std::vector<std::string> describe_transfers(std::size_t most) override;
    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                 bool may_wait) override;

private:
    struct Transfer {
        std::shared_ptr<Segment> segment;
        Page* page = nullptr;
        PinGuard below;  // of its backing segment, until the copy has passed
        std::shared_ptr<const Event> copied;
        std::int64_t begin_ns = 0;  // when the copy was queued
    };
    /// They move from one list to another without allocating, so none is lost where memory is.
    using Transfers = std::list<Transfer>;
    /// Transfers of one direction, and the thread that carries them out in order.
    struct Lane {
        LinkDirection direction;
        std::mutex mutex{};  // guards the next two
        Transfers waiting{};
        bool is_ending = false;
        std::condition_variable changed{};
        std::atomic<std::size_t> in_flight{0};
        std::unique_ptr<Stream> stream{};  // of its thread, made when it is needed
        std::thread thread{};
    };

    void enqueue(Lane& lane, std::shared_ptr<Segment> segment, Page& page);
    void run(Lane& lane);
    bool serve(Lane& lane, Transfers& under_way) noexcept;
    Transfers next(Lane& lane, bool may_wait) noexcept;
    bool begin(Lane& lane, Transfer& transfer) noexcept;
    void begin_copy(Lane& lane, Transfer& transfer, std::span<std::byte> there);
    void end(Lane& lane, const Transfer& transfer, const TransferEnd& end) noexcept;
    void finish(Lane& lane, Transfer& transfer) noexcept;
    void wake_planner() noexcept;
    void look_ahead_when_kicked();
    PinGuard pin_below(const std::shared_ptr<Segment>& backing, std::size_t index, Access access);
    std::shared_ptr<Segment> backing_of(const std::shared_ptr<Segment>& segment);
    std::shared_ptr<Segment> make_backing(const std::shared_ptr<Segment>& segment);
    void note_read(const Transfer& transfer, std::int64_t now_ns);

    Pager& below_;
    Device& device_;
    const bool activations_stay_;
    StoreClient* client_ = nullptr;  // from start() on
    Lane to_device_{LinkDirection::to_device};
    Lane to_host_{LinkDirection::to_host};

    std::mutex making_;  // of who gives a segment its backing segment

    RateMeter read_rate_;
    std::int64_t last_read_ns_ = 0;  // when it had come; thread of reads only

    std::atomic<std::uint32_t> kicks_{0};
    std::atomic<bool> stopping_{false};
    std::thread planner_;
};

}  // namespace torch_offload
