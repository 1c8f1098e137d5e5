// Where pages go that leave a tier's memory, and where they come back from. Layer pager.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pager/page_table.h"
#include "pager/read_times.h"
#include "pager/remote_work.h"
#include "pager/trace.h"
#include "storage/home_file.h"
#include "storage/io_engine.h"

namespace torch_offload {

class UpdateLatch;
class UsePredictor;

enum class TransferStatus : std::uint8_t {
    ok,
    not_now,  // nothing is lost: bytes that were to be read are still stored, those that were to be written in the
              // frame
    lost,     // what came is not what was written, and will not be; of reads only
};

/// How a transfer ended.
struct TransferEnd {
    TransferStatus status = TransferStatus::ok;
    std::exception_ptr error;   // why, unless ok
    std::int64_t begin_ns = 0;  // when it began, if ok
};

/// How often and how long transfers are tried.
struct TransferLimits {
    /// Waits between the attempts at one that fails for a reason that may pass.
    std::vector<std::chrono::milliseconds> retry_delays = default_retry_delays();
    /// So old, the oldest is named in the log, and then again and again.
    std::chrono::milliseconds warn_after{10'000};
    std::chrono::milliseconds warn_every{30'000};
    /// So old, one is late: it stays the engine's, and who waits for it raises.
    std::chrono::milliseconds timeout{120'000};

    static std::vector<std::chrono::milliseconds> default_retry_delays() {
        using std::chrono::milliseconds;
        return {milliseconds(10), milliseconds(100), milliseconds(1'000), milliseconds(5'000)};
    }
};

/// What a store tells its pager. All calls come from threads of the store, without any lock held. How a transfer ended
/// is taken note of even where there is no memory left.
class StoreClient {
public:
    virtual ~StoreClient() = default;
    virtual void end_read(const std::shared_ptr<Segment>& segment, Page& page, const TransferEnd& end) noexcept = 0;
    virtual void end_write(Page& page, const TransferEnd& end) noexcept = 0;
    /// The page's transfer has taken longer than it may; it still ends by one of the two above, some day.
    virtual void note_late(Page& page, IoDirection direction, std::exception_ptr error) noexcept = 0;
    /// Registered free frames that are wanted for something else than transfers; take_unregistered() follows for each.
    virtual std::vector<Frame> frames_to_unregister() = 0;
    virtual void take_unregistered(const Frame& frame) noexcept = 0;
    /// Whether a frame may be registered; end_registration() follows if so.
    virtual bool begin_registration(std::size_t size_bytes) noexcept = 0;
    virtual void end_registration(std::size_t size_bytes, bool is_registered) noexcept = 0;
    /// Evicts ahead of need and starts reads ahead of use. What fails there fails again for who needs it.
    virtual void look_ahead() noexcept = 0;
    /// Of what the program uses in this tier's memory.
    virtual std::shared_ptr<UsePredictor> use_predictor() const = 0;
};

/// What a store is doing just now.
struct StoreStatus {
    std::size_t reads_in_flight = 0;
    std::size_t capacity = 0;    // transfers under way at once at most
    double read_rate = 0;        // bytes per second that reads got lately while there were any to make
    std::size_t home_bytes = 0;  // of pages that lie in files of somebody else's
};

struct StoreStatistics {
    std::uint64_t stored_bytes = 0;       // live extents on SSD
    std::uint64_t file_bytes = 0;         // preallocated on SSD
    std::uint64_t retried_reads = 0;      // attempts after a failed one
    std::uint64_t retried_writes = 0;     // the same
    std::uint64_t healed_mismatches = 0;  // checksums that differed at the first read and agreed at the second
    std::uint64_t quarantined_bytes = 0;  // extents that failed and are not used again
    std::uint64_t home_bytes = 0;         // of pages that lie in files of somebody else's
    ReadTimes::Counts read_times{};       // of the disk
    std::string engine;
};

/// The tier below a pager's memory.
/// Threads: read, write, kick and the questions may come from any; forget from the one that drops the last owner.
class PageStore {
public:
    PageStore() = default;
    PageStore(const PageStore&) = delete;
    PageStore& operator=(const PageStore&) = delete;
    /// After a stop() that returned true.
    virtual ~PageStore() = default;

    /// Starts its threads; the client is called from now on.
    virtual void start(StoreClient& client) = 0;
    /// Ends them after what is in flight; the client is not called any more. False: some of that does not end, and the
    /// store has to stay as it is.
    virtual bool stop() = 0;

    /// Pre: the page is `loading` with a frame, and was written.
    virtual void read(std::shared_ptr<Segment> segment, Page& page) = 0;
    /// Pre: the page is `evicting` and its bytes lie in its frame's slot.
    virtual void write(std::shared_ptr<Segment> segment, Page& page) = 0;
    /// A page that has no bytes lies at `home` until it is written. False: this store reads no such files.
    /// Throws: std::bad_alloc.
    virtual bool set_home(const Page&, HomePlace) { return false; }
    /// Sends what the store itself holds of the segment in memory to SSD, and waits. Throws: what a write throws.
    virtual void evict(Segment& segment) = 0;
    /// Nothing of the segment is in flight, and nobody will read it again.
    virtual void forget(Segment& segment) noexcept = 0;
    /// Asks for look_ahead() and frames_to_unregister().
    virtual void kick() noexcept = 0;
    /// A pass of the program begins, as for Pager::begin_pass().
    virtual void begin_pass(ProgramId) {}
    /// Throws, once, TierIoError for a page that the store has in memory and could not write.
    virtual void end_step() {}

    /// Pages of the index, none of them in the memory above, held where the store keeps them; empty: gave up. Like
    /// Pager::latch_for_update(). Throws: LogicError from a store without memory.
    virtual UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                         bool may_wait) = 0;
    /// Whether the store's own process runs deferred work on pages of the index.
    virtual bool runs_work_on(std::span<const std::shared_ptr<Segment>>, std::size_t) const noexcept { return false; }
    /// Pre: it does; nothing of the pages is in flight, and none of them is read or written before work.end().
    /// Throws: std::bad_alloc; LogicError for work of too many bytes. Then end() is not called.
    virtual void run_work(std::span<const std::shared_ptr<Segment>>, std::size_t, RemoteWork) {}
    /// No more work will come: a store that is silent over what it has is not waited for.
    virtual void end_work() noexcept {}

    virtual StoreStatus status() const noexcept = 0;
    virtual StoreStatistics statistics() const = 0;
    /// Says what is under way, for a person: at most so many transfers, the oldest first. Waits about a second at most.
    virtual std::vector<std::string> describe_transfers(std::size_t) { return {}; }
};

}  // namespace torch_offload
