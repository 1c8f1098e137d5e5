// One store made of several: a client's pages are divided among them. Layer pager: includes base, net.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pager/remote_store.h"

namespace torch_offload {

/// The pages of a segment go to one store after the other by their index, so that memory, networks and disks add up.
/// The family decides which store is first: pages that an update uses together lie at the same one, which runs it, and
/// segments of a single page are spread as well. The store of a page never changes. Each ends for itself: what the
/// others have stays usable. Threads: as PageStore. Each store has one of its own; that of the first has the pager look
/// ahead, as long as it is there.
class DividedStore final : public PageStore {
public:
    /// The rest as for RemoteStore. Pre: there is an address. Throws: what that does for any of them; InvalidArgument
    /// for one that is named twice.
    DividedStore(std::span<const NetAddress> addresses, std::size_t page_bytes, std::size_t queue_depth,
                 const TransferLimits& limits, const std::string& kernels = {});
    ~DividedStore() override;

    void start(StoreClient& client) override;
    bool stop() override;
    void read(std::shared_ptr<Segment> segment, Page& page) override;
    void write(std::shared_ptr<Segment> segment, Page& page) override;
    void evict(Segment&) override {}
    void forget(Segment& segment) noexcept override;
    void kick() noexcept override;
    void begin_pass(ProgramId program) override;
    void end_step() override;

    UpdateLatch latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                 bool may_wait) override;
    /// Whether there is work that any of them runs.
    bool runs_work() const noexcept;
    /// Whether the pages lie at one store, and it runs work on them.
    bool runs_work_on(std::span<const std::shared_ptr<Segment>> segments, std::size_t index) const noexcept override;
    void run_work(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, RemoteWork work) override;
    void end_work() noexcept override;

    /// Sums, and all names.
    StoreStatus status() const noexcept override;
    StoreStatistics statistics() const override;
    std::vector<std::string> describe_transfers(std::size_t most) override;

private:
    class ClientOfOthers;

    void check() const;
    RemoteStore& store_of(const Segment& segment, std::size_t index) const noexcept;

    std::vector<std::unique_ptr<RemoteStore>> stores_;  // never empty
    std::unique_ptr<ClientOfOthers> client_of_others_;  // the client of all but the first, from start() on
};

}  // namespace torch_offload
