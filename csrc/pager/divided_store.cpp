#include "pager/divided_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "pager/page_holds.h"

namespace torch_offload {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B9;  // 2^32 over the golden ratio
constexpr std::size_t kUnequal = 2;            // memory of one store over that of another, from which it is said

}  // namespace

/// What a store that is not the first tells the pager: all but that it is to look ahead.
class DividedStore::ClientOfOthers final : public StoreClient {
public:
    ClientOfOthers(StoreClient& client, RemoteStore& first) noexcept : client_(client), first_(first) {}

    void end_read(const std::shared_ptr<Segment>& segment, Page& page, const TransferEnd& end) noexcept override {
        client_.end_read(segment, page, end);
    }
    void end_write(Page& page, const TransferEnd& end) noexcept override { client_.end_write(page, end); }
    void note_late(Page& page, IoDirection direction, std::exception_ptr error) noexcept override {
        client_.note_late(page, direction, std::move(error));
    }
    std::vector<Frame> frames_to_unregister() override { return client_.frames_to_unregister(); }
    void take_unregistered(const Frame& frame) noexcept override { client_.take_unregistered(frame); }
    bool begin_registration(std::size_t size_bytes) noexcept override { return client_.begin_registration(size_bytes); }
    void end_registration(std::size_t size_bytes, bool is_registered) noexcept override {
        client_.end_registration(size_bytes, is_registered);
    }
    void look_ahead() noexcept override { first_.kick(); }
    std::shared_ptr<UsePredictor> use_predictor() const override { return client_.use_predictor(); }

private:
    StoreClient& client_;
    RemoteStore& first_;
};

DividedStore::DividedStore(std::span<const NetAddress> addresses, std::size_t page_bytes, std::size_t queue_depth,
                           const TransferLimits& limits, const std::string& kernels) {
    for (const NetAddress& address : addresses) {
        stores_.push_back(std::make_unique<RemoteStore>(address, page_bytes, queue_depth, limits, kernels));
    }
    check();
}

DividedStore::~DividedStore() { stop(); }

/// Says what the first step would not: two names may lead to one process, and the smallest memory is the first that is
/// full.
void DividedStore::check() const {
    for (auto store = stores_.begin(); store != stores_.end(); ++store) {
        const auto is_same = [&](const auto& other) { return other->identity() == (*store)->identity(); };
        const auto same = std::find_if(stores_.begin(), store, is_same);
        OFFLOAD_CHECK(same == store, InvalidArgument, (*same)->name(), " and ", (*store)->name(),
                      " are the same process; name each once");
    }
    const auto [least, most] = std::ranges::minmax_element(
        stores_, {}, [](const std::unique_ptr<RemoteStore>& store) { return store->budget_bytes(); });
    if ((*most)->budget_bytes() < kUnequal * (*least)->budget_bytes()) return;
    OFFLOAD_LOG(warning, "pages are divided evenly among stores: ", (*least)->name(), " has ", (*least)->budget_bytes(),
                " bytes of memory for them, ", (*most)->name(), " ", (*most)->budget_bytes(),
                "; the smaller one moves more to its SSD, and all may wait for that. Give stores the same --ram");
}

/// Numbers that come in a row, or every few, are spread evenly by the golden ratio (Knuth, The Art of Computer
/// Programming 3, 6.4).
RemoteStore& DividedStore::store_of(const Segment& segment, std::size_t index) const noexcept {
    const auto part = static_cast<std::uint32_t>(segment.family * kGolden);  // of all, in 32 bits
    const std::size_t first = std::uint64_t{part} * stores_.size() >> 32;
    return *stores_[(first + index) % stores_.size()];
}

void DividedStore::start(StoreClient& client) {
    client_of_others_ = std::make_unique<ClientOfOthers>(client, *stores_.front());
    stores_.front()->start(client);
    for (std::size_t i = 1; i < stores_.size(); ++i) stores_[i]->start(*client_of_others_);
}

/// The first one first: nothing is read ahead any more.
bool DividedStore::stop() {
    bool have_ended = true;
    for (const auto& store : stores_) have_ended = store->stop() && have_ended;
    return have_ended;
}

void DividedStore::read(std::shared_ptr<Segment> segment, Page& page) {
    RemoteStore& store = store_of(*segment, segment->index_of(page));
    store.read(std::move(segment), page);
}

void DividedStore::write(std::shared_ptr<Segment> segment, Page& page) {
    RemoteStore& store = store_of(*segment, segment->index_of(page));
    store.write(std::move(segment), page);
}

void DividedStore::forget(Segment& segment) noexcept {
    for (const auto& store : stores_) store->forget(segment);
}

void DividedStore::kick() noexcept { stores_.front()->kick(); }

void DividedStore::begin_pass(ProgramId program) {
    for (const auto& store : stores_) store->begin_pass(program);
}

void DividedStore::end_step() {
    for (const auto& store : stores_) store->end_step();
}

// --- Updates ------------------------------------------------------------------------------------------------------

UpdateLatch DividedStore::latch_for_update(std::span<const std::shared_ptr<Segment>> segments, std::size_t index,
                                           bool may_wait) {
    return stores_.front()->latch_for_update(segments, index, may_wait);
}

bool DividedStore::runs_work() const noexcept {
    return std::ranges::any_of(stores_, [](const auto& store) { return store->runs_work(); });
}

bool DividedStore::runs_work_on(std::span<const std::shared_ptr<Segment>> segments, std::size_t index) const noexcept {
    if (segments.empty()) return false;
    const RemoteStore& store = store_of(*segments.front(), index);
    const auto is_there = [&](const auto& segment) { return &store_of(*segment, index) == &store; };
    return std::ranges::all_of(segments, is_there) && store.runs_work_on(segments, index);
}

void DividedStore::run_work(std::span<const std::shared_ptr<Segment>> segments, std::size_t index, RemoteWork work) {
    store_of(*segments.front(), index).run_work(segments, index, std::move(work));
}

void DividedStore::end_work() noexcept {
    for (const auto& store : stores_) store->end_work();
}

// --- Figures ------------------------------------------------------------------------------------------------------

StoreStatus DividedStore::status() const noexcept {
    StoreStatus sum;
    for (const auto& store : stores_) {
        const StoreStatus one = store->status();
        sum.reads_in_flight += one.reads_in_flight;
        sum.capacity += one.capacity;
        sum.read_rate += one.read_rate;
    }
    return sum;
}

/// The rest is about a disk.
StoreStatistics DividedStore::statistics() const {
    StoreStatistics sum;
    for (const auto& store : stores_) {
        const StoreStatistics one = store->statistics();
        sum.stored_bytes += one.stored_bytes;
        sum.retried_reads += one.retried_reads;
        sum.retried_writes += one.retried_writes;
        sum.healed_mismatches += one.healed_mismatches;
        sum.engine += sum.engine.empty() ? one.engine : concat(", ", one.engine);
    }
    return sum;
}

std::vector<std::string> DividedStore::describe_transfers(std::size_t most) {
    std::vector<std::string> all;
    for (const auto& store : stores_) {
        std::ranges::move(store->describe_transfers(most), std::back_inserter(all));
    }
    return all;
}

}  // namespace torch_offload
