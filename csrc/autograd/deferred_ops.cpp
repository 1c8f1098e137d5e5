#include "autograd/deferred_ops.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_set>
#include <utility>

#include "autograd/compute_device.h"
#include "autograd/deferred_chain.h"
#include "autograd/encoded_work.h"
#include "autograd/profiler_range.h"
#include "autograd/recorded_op.h"
#include "autograd/register_allocator.h"
#include "base/activity_log.h"
#include "base/check.h"
#include "base/counters.h"
#include "base/log.h"
#include "base/wait.h"

namespace torch_offload {
namespace {

/// Longer chains are worked off first. Only parameters that are updated and never read get there.
constexpr std::size_t kMaxLength = 64;

using Segments = std::vector<std::shared_ptr<Segment>>;
using ChainPointer = std::shared_ptr<DeferredChain>;

/// Marks the page of every segment that lets itself be marked. True if all did.
bool postpone(Pager& pager, const Segments& segments, std::size_t index) {
    bool all_marked = true;
    for (const std::shared_ptr<Segment>& segment : segments) {
        all_marked = pager.set_pending(*segment, index) && all_marked;
    }
    return all_marked;
}

bool are_in_memory(const Segments& segments, std::size_t index) {
    return std::all_of(segments.begin(), segments.end(), [&](const auto& s) { return Pager::in_memory(*s, index); });
}

/// Nobody will read the pages of segments that the program has given up.
void discard(UpdateLatch& latch, const std::vector<bool>& released) noexcept {
    for (std::size_t k = 0; k < released.size(); ++k) {
        if (released[k]) latch.discard(k);
    }
}

/// The chains that the segments belong to, each once, the one with most members first.
std::vector<ChainPointer> chains_of(const Segments& segments) {
    std::vector<ChainPointer> found;
    for (const std::shared_ptr<Segment>& segment : segments) {
        ChainPointer chain = DeferredChain::of(*segment);
        if (chain && std::find(found.begin(), found.end(), chain) == found.end()) found.push_back(std::move(chain));
    }
    std::sort(found.begin(), found.end(), [](const ChainPointer& one, const ChainPointer& other) {
        return one->members().size() > other->members().size();
    });
    return found;
}

/// Of the chains that segments belong to, the one to work off before an operator on the segments can be appended;
/// nullptr: there is none. Orders of different chains cannot be joined, nor those of other pages, and a chain does not
/// grow without end.
ChainPointer in_the_way(std::span<const ChainPointer> found, std::size_t page_count) {
    const bool is_free = found.empty() || (found.size() == 1 && found.front()->length() < kMaxLength &&
                                           found.front()->page_count() == page_count);
    return is_free ? nullptr : found.back();
}

}  // namespace

struct DeferredOps::Impl {
    Impl(Pager& a_pager, c10::Device a_device) : pager(a_pager), torch_device(a_device) {}

    /// The right to advance one page of a chain. Whoever ends the last turn of a chain that is
    /// finished, or that the program cannot reach any more, dissolves it.
    class Turn {
    public:
        /// Nothing if another thread has the page and this one may not wait.
        static std::optional<Turn> take(Impl& impl, ChainPointer chain, std::size_t index, bool may_wait);
        Turn(Turn&& other) noexcept = default;
        ~Turn();

        PageWork work() const;
        /// Runs what is outstanding on latched pages.
        void run(const PageWork& work, UpdateLatch& latch, KernelThreads threads) const;
        void count_applied() const;
        std::vector<bool> released_of(const PageWork& work) const;
        void note_late(std::exception_ptr error) const noexcept;
        const ChainPointer& chain() const noexcept { return chain_; }
        std::size_t index() const noexcept { return index_; }

    private:
        Turn(Impl& impl, ChainPointer chain, std::size_t index)
            : impl_(&impl), chain_(std::move(chain)), index_(index) {}
        Impl* impl_;
        ChainPointer chain_;
        std::size_t index_;
    };

    /// Work that the store's process runs, and what is held meanwhile. Ends on a thread of the store's.
    struct RemoteTurn;
    /// Runs what is outstanding on the page of the turn. Returns the operators run, or, without `may_wait`, that the
    /// store's process has been asked to run; nothing if the pager gave up.
    std::optional<std::size_t> advance(Turn turn, bool may_wait);
    std::size_t run_remotely(Turn turn, const PageWork& work, UpdateLatch latch, bool may_wait);
    void begin(RemoteTurn& remote, RemoteWork work);
    void end(RemoteTurn& remote, std::size_t ran, std::exception_ptr error) noexcept;
    template <typename IsOver>
    void wait_for_turn(std::unique_lock<std::mutex>& lock, const DeferredChain& chain, std::size_t index,
                       IsOver is_over);

    /// What a chain leaves behind, kept by the caller until the lock is open: letting go of it calls the pager.
    using Released = std::pair<ChainPointer, Segments>;  // nothing, or a chain without members and what they were
    [[nodiscard]] Released dissolve(ChainPointer chain) noexcept;

    ChainPointer chain_of(const Segment& segment) const {
        const std::lock_guard lock(mutex);
        return DeferredChain::of(segment);
    }
    void make_way(const Segments& segments, std::size_t page_count);
    ChainPointer append(RecordedOp op, const Segments& segments);
    void settle(std::span<const ChainPointer> changed);
    void settle(const ChainPointer& chain);
    void settle_page(const ChainPointer& chain, std::size_t index);
    void force(const ChainPointer& chain);
    void discard_unreachable() noexcept;
    void note_recording_thread();
    std::optional<c10::Stream> recording_stream() const;
    KernelThreads threads(bool may_wait) const noexcept;
    void note_update(std::int64_t begin_ns, std::span<const std::span<std::byte>> pages, const Segment& segment) const;

    Pager& pager;
    const c10::Device torch_device;  // where updates run
    mutable std::mutex mutex;        // chains and Segment::deferred; never held across a call of the pager or of torch
    std::condition_variable turn_ended;
    std::unordered_set<ChainPointer> chains;
    std::atomic<std::thread::id> recording_thread{};
    std::optional<c10::Stream> stream;  // of the recording thread: kernels that follow the program's in order
    std::ptrdiff_t remote_turns = 0;    // under way; of the mutex
    Counter recorded_elements, applied_pages, applied_at_once, applied_remotely, forced_chains;
};

// --- Turns --------------------------------------------------------------------------------------------------------

std::optional<DeferredOps::Impl::Turn> DeferredOps::Impl::Turn::take(Impl& impl, ChainPointer chain, std::size_t index,
                                                                     bool may_wait) {
    std::unique_lock lock(impl.mutex);
    if (chain->is_taken(index) && !may_wait) return std::nullopt;
    impl.wait_for_turn(lock, *chain, index, [&] { return !chain->is_taken(index); });
    chain->set_taken(index, true);
    return Turn(impl, std::move(chain), index);
}

/// Throws: what ends a wait early; why, if what has the page is late.
template <typename IsOver>
void DeferredOps::Impl::wait_for_turn(std::unique_lock<std::mutex>& lock, const DeferredChain& chain, std::size_t index,
                                      IsOver is_over) {
    const InterruptibleWait wait;
    while (!turn_ended.wait_for(lock, InterruptibleWait::kSlice, is_over)) {
        if (const std::exception_ptr late = chain.why_late(index)) {
            lock.unlock();
            std::rethrow_exception(late);
        }
        lock.unlock();
        wait.check();
        lock.lock();
    }
}

DeferredOps::Impl::Turn::~Turn() {
    if (!chain_) return;
    Released released;
    {
        const std::lock_guard lock(impl_->mutex);
        chain_->set_taken(index_, false);
        if (chain_->is_finished() || chain_->is_unreachable()) released = impl_->dissolve(chain_);
    }
    impl_->turn_ended.notify_all();
}

PageWork DeferredOps::Impl::Turn::work() const {
    const std::lock_guard lock(impl_->mutex);
    return chain_->work_on(index_);
}

void DeferredOps::Impl::Turn::count_applied() const {
    impl_->applied_pages.increment();
    const std::lock_guard lock(impl_->mutex);
    chain_->count_applied(index_);
}

void DeferredOps::Impl::Turn::note_late(std::exception_ptr error) const noexcept {
    {
        const std::lock_guard lock(impl_->mutex);
        chain_->set_late(index_, std::move(error));
    }
    impl_->turn_ended.notify_all();
}

void DeferredOps::Impl::Turn::run(const PageWork& work, UpdateLatch& latch, KernelThreads threads) const {
    for (const PlacedOp& operation : work.operations) {
        std::vector<std::span<std::byte>> pages;
        for (const std::size_t position : operation.positions) pages.push_back(latch.bytes(position));
        const std::int64_t begin_ns = activity_now_ns();
        {
            const ProfilerRange range("torch_offload::update");
            operation.op->run(pages, index_, threads);
        }
        impl_->note_update(begin_ns, pages, *work.segments.front());
        count_applied();
    }
    latch.finish();
    discard(latch, released_of(work));
}

/// Of each segment, whether the program has given it up.
std::vector<bool> DeferredOps::Impl::Turn::released_of(const PageWork& work) const {
    std::vector<bool> released;
    const std::lock_guard lock(impl_->mutex);
    for (const auto& segment : work.segments) released.push_back(chain_->is_released(*segment));
    return released;
}

std::optional<std::size_t> DeferredOps::Impl::advance(Turn turn, bool may_wait) {
    const PageWork work = turn.work();
    if (work.empty()) return 0;
    // What a recorded kernel allocates must not wait for memory that only the record's end can free.
    const AllocatorBypass bypass;
    const c10::OptionalStreamGuard in_order(recording_stream());  // outlives the latch, whose end marks it
    UpdateLatch latch = pager.latch_for_update(work.segments, turn.index(), may_wait);
    if (!latch) return std::nullopt;
    if (latch.is_remote()) return run_remotely(std::move(turn), work, std::move(latch), may_wait);
    turn.run(work, latch, threads(may_wait));
    return work.operations.size();
}

// --- Work that the store's process runs -----------------------------------------------------------------------------

/// Shared by what ends it and by who waits for it.
struct DeferredOps::Impl::RemoteTurn {
    std::optional<Turn> turn;
    UpdateLatch latch;      // ends before the turn
    std::size_t count = 0;  // of operators
    std::vector<bool> released;
    bool has_ended = false;  // of the mutex, as the next
    std::exception_ptr error{};

    void finish() noexcept {
        latch.finish();
        discard(latch, released);
    }
};

/// Throws, with `may_wait`: why not all of it ran.
std::size_t DeferredOps::Impl::run_remotely(Turn turn, const PageWork& work, UpdateLatch latch, bool may_wait) {
    const ChainPointer chain = turn.chain();
    const std::size_t index = turn.index();
    RemoteWork asked{encode_work(work.operations, index), turn.released_of(work), {}, {}};
    const auto remote = std::make_shared<RemoteTurn>(
        RemoteTurn{std::move(turn), std::move(latch), work.operations.size(), asked.is_worthless});
    asked.end = [this, remote](std::size_t ran, std::exception_ptr error) { end(*remote, ran, std::move(error)); };
    asked.note_late = [remote](std::exception_ptr error) { remote->turn->note_late(std::move(error)); };
    begin(*remote, std::move(asked));
    std::unique_lock lock(mutex);
    if (may_wait) wait_for_turn(lock, *chain, index, [&] { return remote->has_ended; });
    const std::exception_ptr error = may_wait ? remote->error : nullptr;
    lock.unlock();
    if (error) std::rethrow_exception(error);
    return work.operations.size();
}

void DeferredOps::Impl::begin(RemoteTurn& remote, RemoteWork work) {
    const auto count_turns = [this](int change) {
        const std::lock_guard lock(mutex);
        remote_turns += change;
    };
    count_turns(1);
    try {
        remote.latch.run_remotely(std::move(work));
    } catch (...) {
        count_turns(-1);
        throw;
    }
}

/// On a thread of the store's.
void DeferredOps::Impl::end(RemoteTurn& remote, std::size_t ran, std::exception_ptr error) noexcept {
    for (std::size_t k = 0; k < std::min(ran, remote.count); ++k) remote.turn->count_applied();
    applied_remotely.add(ran);
    if (ran > 0) remote.latch.note_ran();
    if (ran == remote.count) remote.finish();
    remote.latch = UpdateLatch();
    {
        const std::lock_guard lock(mutex);
        remote.error = std::move(error);
        remote.has_ended = true;
    }
    remote.turn.reset();
    const std::lock_guard lock(mutex);  // also while others are told: who waits for the last one ends this
    remote_turns -= 1;
    turn_ended.notify_all();
}

void DeferredOps::Impl::note_update(std::int64_t begin_ns, std::span<const std::span<std::byte>> pages,
                                    const Segment& segment) const {
    ActivityLog* const log = pager.options().activity_log;
    if (!log || !log->is_on()) return;
    std::size_t size_bytes = 0;
    for (const std::span<std::byte> page : pages) size_bytes += page.size();
    log->add({ActivityLane::update, begin_ns, activity_now_ns(), size_bytes, segment.label});
}

void DeferredOps::Impl::note_recording_thread() {
    recording_thread.store(std::this_thread::get_id(), std::memory_order_relaxed);
    const std::optional<c10::Stream> now = current_stream(torch_device);
    const std::lock_guard lock(mutex);
    stream = now;
}

std::optional<c10::Stream> DeferredOps::Impl::recording_stream() const {
    const std::lock_guard lock(mutex);
    return stream;
}

/// Beside the thread that trains, kernels run on one core each.
KernelThreads DeferredOps::Impl::threads(bool may_wait) const noexcept {
    const bool is_training = std::this_thread::get_id() == recording_thread.load(std::memory_order_relaxed);
    return may_wait && is_training ? KernelThreads::all : KernelThreads::one;
}

// --- Recording ----------------------------------------------------------------------------------------------------

void DeferredOps::Impl::make_way(const Segments& segments, std::size_t page_count) {
    while (true) {
        std::unique_lock lock(mutex);
        const ChainPointer chain = in_the_way(chains_of(segments), page_count);
        lock.unlock();
        if (!chain) return;
        forced_chains.increment();
        force(chain);
    }
}

/// Adds the operator to the one chain that its segments are in, or to a new one.
ChainPointer DeferredOps::Impl::append(RecordedOp op, const Segments& segments) {
    const std::size_t page_count = op.page_count();
    while (true) {
        {
            const std::lock_guard lock(mutex);
            const std::vector<ChainPointer> found = chains_of(segments);
            if (!in_the_way(found, page_count)) {
                const ChainPointer chain = found.empty() ? std::make_shared<DeferredChain>(page_count) : found.front();
                chains.insert(chain);
                for (const std::shared_ptr<Segment>& segment : segments) segment->set_worked_pages(page_count);
                DeferredChain::append(chain, std::move(op), segments);
                recorded_elements.increment();
                return chain;
            }
        }
        make_way(segments, page_count);
    }
}

/// Sees to it that no page can be read without the operator just appended. A page that cannot be brought now waits with
/// its work: whoever uses it meets the same error. Throws only for a page that cannot wait, after all others.
void DeferredOps::Impl::settle(const ChainPointer& chain) {
    std::exception_ptr failure;
    for (std::size_t index = 0; index < chain->page_count(); ++index) {
        try {
            settle_page(chain, index);
        } catch (const std::exception& error) {
            const std::optional<Turn> turn = Turn::take(*this, chain, index, true);
            if (postpone(pager, turn->work().segments, index)) {
                OFFLOAD_LOG(info, "an update is left to the next use: ", error.what());
            } else if (!failure) {
                failure = std::current_exception();
            }
        }
    }
    if (failure) std::rethrow_exception(failure);
}

/// All of them, whatever happens to one.
void DeferredOps::Impl::settle(std::span<const ChainPointer> changed) {
    std::exception_ptr failure;
    for (const ChainPointer& chain : changed) {
        try {
            settle(chain);
        } catch (...) {
            if (!failure) failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

/// Updates the page at once if all of it is in the memory where updates are applied, or if somebody holds an address
/// into it.
void DeferredOps::Impl::settle_page(const ChainPointer& chain, std::size_t index) {
    std::optional<Turn> turn = Turn::take(*this, chain, index, true);
    const PageWork work = turn->work();
    const bool is_ready = !pager.options().updates_below && are_in_memory(work.segments, index);
    if (!is_ready && postpone(pager, work.segments, index)) return;
    applied_at_once.add(advance(std::move(*turn), true).value_or(0));
}

void DeferredOps::Impl::force(const ChainPointer& chain) {
    for (std::size_t index = 0; index < chain->page_count(); ++index) {
        advance(*Turn::take(*this, chain, index, true), true);
    }
}

// --- Work that nobody can see any more ------------------------------------------------------------------------------

void DeferredOps::Impl::discard_unreachable() noexcept {
    std::vector<Released> released;
    const std::lock_guard lock(mutex);
    for (auto it = chains.begin(); it != chains.end();) {
        const ChainPointer& chain = *it++;
        if (chain->is_unreachable()) released.push_back(dissolve(chain));
    }
}

DeferredOps::Impl::Released DeferredOps::Impl::dissolve(ChainPointer chain) noexcept {
    chains.erase(chain);
    Segments segments = chain->dissolve();
    return {std::move(chain), std::move(segments)};
}

// --- DeferredOps --------------------------------------------------------------------------------------------------

DeferredOps::DeferredOps(std::shared_ptr<Pager> pager, c10::Device torch_device)
    : pager_(std::move(pager)),
      impl_(std::make_unique<Impl>(*pager_, pager_->options().updates_below ? c10::Device(c10::kCPU) : torch_device)) {}

DeferredOps::~DeferredOps() {
    std::vector<Impl::Released> released;
    std::unique_lock lock(impl_->mutex);
    impl_->turn_ended.wait(lock, [this] { return impl_->remote_turns == 0; });
    while (!impl_->chains.empty()) released.push_back(impl_->dissolve(*impl_->chains.begin()));
}

bool DeferredOps::is_recordable(const c10::OperatorHandle& op) { return works_by_element(op); }

bool DeferredOps::try_record(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const std::size_t argument_count = op.schema().arguments().size();
    std::optional<RecordableCall> call =
        RecordableCall::parse(op, torch::jit::last(*stack, argument_count), impl_->torch_device);
    if (!call || call->recordable().empty() || !call->rehearse()) return false;
    impl_->note_recording_thread();
    impl_->discard_unreachable();
    // What may fail first, then all of the list is recorded, then it is worked on: never a part of a list only.
    for (const std::size_t element : call->recordable()) {
        impl_->make_way(call->segments(element), call->page_count(element));
    }
    std::vector<ChainPointer> chains;
    for (const std::size_t element : call->recordable()) {
        chains.push_back(impl_->append(call->record(element), call->segments(element)));
    }
    impl_->settle(chains);
    std::optional<std::vector<c10::IValue>> rest = call->rest();
    if (!rest) {
        torch::jit::drop(*stack, argument_count);
        return true;
    }
    std::move(rest->begin(), rest->end(), stack->end() - static_cast<std::ptrdiff_t>(argument_count));
    return false;
}

bool DeferredOps::resolve(Segment& segment, std::size_t index, bool may_wait) {
    ChainPointer chain = impl_->chain_of(segment);
    if (!chain) {
        const bool is_pending = segment.page(index).load().has(PageWord::kPending);
        OFFLOAD_CHECK(!is_pending || !may_wait, LogicError, "page ", index, " of ", segment.label,
                      " waits for recorded work that is gone");
        return !is_pending;
    }
    std::optional<Impl::Turn> turn = Impl::Turn::take(*impl_, std::move(chain), index, may_wait);
    return turn && impl_->advance(std::move(*turn), may_wait).has_value();
}

void DeferredOps::force(const std::shared_ptr<Segment>& segment) {
    if (const ChainPointer chain = impl_->chain_of(*segment)) impl_->force(chain);
}

void DeferredOps::force_all() {
    impl_->discard_unreachable();
    std::vector<ChainPointer> all;
    {
        const std::lock_guard lock(impl_->mutex);
        all.assign(impl_->chains.begin(), impl_->chains.end());
    }
    std::exception_ptr first_failure;
    for (const ChainPointer& chain : all) {
        try {
            impl_->force(chain);
        } catch (...) {
            if (!first_failure) first_failure = std::current_exception();
        }
    }
    if (first_failure) std::rethrow_exception(first_failure);
}

void DeferredOps::release(std::shared_ptr<Segment> segment) noexcept {
    Impl::Released released;
    ChainPointer chain;
    const std::lock_guard lock(impl_->mutex);
    chain = DeferredChain::of(*segment);
    if (!chain) return;
    chain->release(*segment);
    if (chain->is_unreachable()) released = impl_->dissolve(chain);
}

bool DeferredOps::has_work(const Segment& segment) const { return impl_->chain_of(segment) != nullptr; }

std::vector<std::shared_ptr<Segment>> DeferredOps::members(const Segment& segment) const {
    const std::lock_guard lock(impl_->mutex);
    const ChainPointer chain = DeferredChain::of(segment);
    return chain ? chain->members() : Segments{};
}

DeferredStatistics DeferredOps::statistics() const {
    return {impl_->recorded_elements.get(), impl_->applied_pages.get(), impl_->applied_at_once.get(),
            impl_->applied_remotely.get(), impl_->forced_chains.get()};
}

}  // namespace torch_offload
