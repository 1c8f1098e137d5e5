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
/// nullptr: there is none. Orders of different chains cannot be joined, and a chain does not grow without end.
ChainPointer in_the_way(std::span<const ChainPointer> found) {
    const bool is_free = found.empty() || (found.size() == 1 && found.front()->length() < kMaxLength);
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
        /// Runs what is outstanding. Returns the operators run, or nothing if the pager gave up.
        std::optional<std::size_t> advance(const PageWork& work, bool may_wait) const;
        void count_applied() const;

    private:
        void discard_released(const PageWork& work, UpdateLatch& latch) const;
        Turn(Impl& impl, ChainPointer chain, std::size_t index)
            : impl_(&impl), chain_(std::move(chain)), index_(index) {}
        Impl* impl_;
        ChainPointer chain_;
        std::size_t index_;
    };

    /// What a chain leaves behind, kept by the caller until the lock is open: letting go of it calls the pager.
    using Released = std::pair<ChainPointer, Segments>;  // nothing, or a chain without members and what they were
    [[nodiscard]] Released dissolve(ChainPointer chain) noexcept;

    ChainPointer chain_of(const Segment& segment) const {
        const std::lock_guard lock(mutex);
        return DeferredChain::of(segment);
    }
    void make_way(const Segments& segments);
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
    Counter recorded_elements, applied_pages, applied_at_once, forced_chains;
};

// --- Turns --------------------------------------------------------------------------------------------------------

std::optional<DeferredOps::Impl::Turn> DeferredOps::Impl::Turn::take(Impl& impl, ChainPointer chain, std::size_t index,
                                                                     bool may_wait) {
    std::unique_lock lock(impl.mutex);
    if (chain->is_taken(index) && !may_wait) return std::nullopt;
    const InterruptibleWait wait;
    while (!impl.turn_ended.wait_for(lock, InterruptibleWait::kSlice, [&] { return !chain->is_taken(index); })) {
        lock.unlock();
        wait.check();
        lock.lock();
    }
    chain->set_taken(index, true);
    return Turn(impl, std::move(chain), index);
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

std::optional<std::size_t> DeferredOps::Impl::Turn::advance(const PageWork& work, bool may_wait) const {
    if (work.empty()) return 0;
    // What a recorded kernel allocates must not wait for memory that only the record's end can free.
    const AllocatorBypass bypass;
    const c10::OptionalStreamGuard in_order(impl_->recording_stream());  // outlives the latch, whose end marks it
    UpdateLatch latch = impl_->pager.latch_for_update(work.segments, index_, may_wait);
    if (!latch) return std::nullopt;
    for (const PlacedOp& operation : work.operations) {
        std::vector<std::span<std::byte>> pages;
        for (const std::size_t position : operation.positions) pages.push_back(latch.bytes(position));
        const std::int64_t begin_ns = activity_now_ns();
        {
            const ProfilerRange range("torch_offload::update");
            operation.op->run(pages, impl_->threads(may_wait));
        }
        impl_->note_update(begin_ns, pages, *work.segments.front());
        count_applied();
    }
    latch.finish();
    discard_released(work, latch);
    return work.operations.size();
}

void DeferredOps::Impl::Turn::discard_released(const PageWork& work, UpdateLatch& latch) const {
    std::vector<std::size_t> released;
    {
        const std::lock_guard lock(impl_->mutex);
        for (std::size_t position = 0; position < work.segments.size(); ++position) {
            if (chain_->is_released(*work.segments[position])) released.push_back(position);
        }
    }
    for (const std::size_t position : released) latch.discard(position);
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

void DeferredOps::Impl::make_way(const Segments& segments) {
    while (true) {
        std::unique_lock lock(mutex);
        const ChainPointer chain = in_the_way(chains_of(segments));
        lock.unlock();
        if (!chain) return;
        forced_chains.increment();
        force(chain);
    }
}

/// Adds the operator to the one chain that its segments are in, or to a new one.
ChainPointer DeferredOps::Impl::append(RecordedOp op, const Segments& segments) {
    while (true) {
        {
            const std::lock_guard lock(mutex);
            const std::vector<ChainPointer> found = chains_of(segments);
            if (!in_the_way(found)) {
                const ChainPointer chain =
                    found.empty() ? std::make_shared<DeferredChain>(segments.front()->page_count()) : found.front();
                chains.insert(chain);
                DeferredChain::append(chain, std::move(op), segments);
                recorded_elements.increment();
                return chain;
            }
        }
        make_way(segments);
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
    const std::optional<Turn> turn = Turn::take(*this, chain, index, true);
    const PageWork work = turn->work();
    const bool is_ready = !pager.options().updates_below && are_in_memory(work.segments, index);
    if (!is_ready && postpone(pager, work.segments, index)) return;
    applied_at_once.add(turn->advance(work, true).value_or(0));
}

void DeferredOps::Impl::force(const ChainPointer& chain) {
    for (std::size_t index = 0; index < chain->page_count(); ++index) {
        const std::optional<Turn> turn = Turn::take(*this, chain, index, true);
        turn->advance(turn->work(), true);
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
    const std::lock_guard lock(impl_->mutex);
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
    for (const std::size_t element : call->recordable()) impl_->make_way(call->segments(element));
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
    const std::optional<Impl::Turn> turn = Impl::Turn::take(*impl_, std::move(chain), index, may_wait);
    return turn && turn->advance(turn->work(), may_wait).has_value();
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
            impl_->forced_chains.get()};
}

}  // namespace torch_offload
