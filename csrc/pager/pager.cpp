#include "pager/pager.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/units.h"
#include "device/address_space.h"
#include "pager/pager_guards.h"
#include "pager/shared_budget.h"
#include "pager/ssd_store.h"

namespace torch_offload {
namespace {

constexpr std::size_t kDefaultElementBytes =
    4;  // pages of this element size may be put together to a gradient's memory

/// Of the budget, that pages may take which accesses behind the dispatcher reached last: released when memory is short.
constexpr std::size_t kShareOfFaulted = 2;

/// What operations may allocate in small pieces while all other memory is pinned.
std::size_t small_reserve(std::size_t budget_bytes) { return std::min(budget_bytes / 16, 4 * kMiB); }

/// A page moves alone. If it is not whole huge pages, the system keeps all of a huge page while any part of it is used,
/// and the process grows beyond the budget.
HugePages huge_pages_for(const PagerOptions& options) {
    constexpr std::size_t kSmallestElementBytes = 2;
    const bool is_whole = options.page_elements * kSmallestElementBytes % kHugePageBytes == 0;
    return is_whole ? HugePages::allowed : HugePages::never;
}

/// False if the system refuses it.
bool can_show_to_forks(Memory& memory, std::span<std::byte> range) noexcept try {
    memory.hide_from_fork(range, false);
    return true;
} catch (const std::exception& error) {
    OFFLOAD_LOG(debug, "memory is not reused: ", error.what());
    return false;
}

/// Whether all of the segment's memory lies at its address as it came from allocate_range(): the next allocation of
/// that size, a gradient of the next step, can have it without the system zeroing new memory.
bool is_whole_in_place(const Segment& segment) {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        const Page& page = segment.page(i);
        const PageWord word = page.load();
        const bool is_in_place = word.state() == PageState::mapped && word.has(PageWord::kWritable);
        if (!is_in_place || page.frame.fixed_index != kUnregistered) return false;
    }
    return true;
}

/// The segment is the one of its role from now on; the lock is held. Pre: it has one.
void give_role(Pager::Impl& pager, const std::shared_ptr<Segment>& segment) {
    if (pager.roles.size() <= segment->trace_id) pager.roles.resize(segment->trace_id + 1);
    pager.roles[segment->trace_id] = segment;
}

/// A store whose transfers do not end: its files and buffers stay as they are until the process ends.
void keep_for_good(std::unique_ptr<PageStore> store) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::unique_ptr<PageStore>>;
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(store));
}

}  // namespace

Pager::Impl::Impl(Pager& pager, const PagerOptions& pager_options, std::unique_ptr<PageStore> page_store)
    : owner(pager),
      options(pager_options),
      memory(pager_options.memory ? *pager_options.memory : AddressSpace::process()),
      fault_errors(pager_options.fault_notice),
      arena({pager_options.share ? pager_options.share->held_bytes() : pager_options.budget_bytes,
             small_reserve(pager_options.budget_bytes), pager_options.page_elements * kDefaultElementBytes,
             huge_pages_for(pager_options), &memory}),
      fault_holds(pager_options.budget_bytes / kShareOfFaulted),
      store(std::move(page_store)) {
    OFFLOAD_CHECK(options.budget_bytes > 0, InvalidArgument, "the RAM budget is 0 bytes");
    OFFLOAD_CHECK(options.page_elements > 0 && options.page_elements % kSectorBytes == 0, InvalidArgument,
                  "page_elements must be a positive multiple of ", kSectorBytes, ", got ", options.page_elements);
    predictor->leave_out(stalls);
    if (options.share) shared = std::make_unique<SharedBudget>(*this, *options.share);
    service = std::make_unique<ServiceThread>(*this);
    service->start();
    store->start(*this);
}

Pager::Impl::~Impl() {
    service->stop();
    if (!store->stop()) keep_for_good(std::move(store));
}

Pager::Pager(const PagerOptions& options) : Pager(options, make_io_engine(options.engine, options.queue_depth)) {}

Pager::Pager(const PagerOptions& options, std::unique_ptr<IoEngine> engine)
    : Pager(options, std::make_unique<SsdStore>(options.directories, std::move(engine), options.transfer_limits)) {}

Pager::Pager(const PagerOptions& options, std::unique_ptr<PageStore> store)
    : options_(options), impl_(std::make_unique<Impl>(*this, options_, std::move(store))) {}

/// Kernels that still run use memory of the pager's, and what is kept for them owns segments: all of it ends here, also
/// what cannot be waited for, such as the kernels of a stream that is captured into a graph meanwhile.
Pager::~Pager() {
    try {
        while (impl_->wait_for_oldest_use()) {
        }
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "the device failed while it was being waited for: ", error.what());
    }
    while (const std::optional<InFlightUse> use = impl_->uses.take_oldest()) {
        if (!use->event->has_passed()) wait_until_passed(*use->event);
        impl_->close_use(*use);
    }
}

void Pager::set_pending_work(ResolvePending resolve, PendingMembers members) {
    const std::unique_lock lock(impl_->pending_mutex);
    impl_->resolve = std::move(resolve);
    impl_->members = std::move(members);
}

void Pager::clear_pending_work() {
    impl_->store->end_work();
    set_pending_work(nullptr, nullptr);
}

// --- Segments -----------------------------------------------------------------------------------------------------

std::span<std::byte> Pager::Impl::whole_granules(std::span<std::byte> bytes) const noexcept {
    return {bytes.data(), whole_granules(bytes.size())};
}

std::size_t Pager::Impl::whole_granules(std::size_t size_bytes) const noexcept {
    return round_up(size_bytes, memory.granularity_bytes());
}

/// Each page moves alone.
void Pager::Impl::check_page_size(std::size_t element_bytes) const {
    const std::size_t granule_bytes = memory.granularity_bytes();
    const std::size_t works = std::lcm(granule_bytes / std::gcd(granule_bytes, element_bytes), kSectorBytes);
    OFFLOAD_CHECK(options.page_elements % works == 0, InvalidArgument, "pages of ", options.page_elements,
                  " elements of ", element_bytes, " bytes are not made of the ", tier_name(), " memory's granules of ",
                  granule_bytes, " bytes; page_elements of ", round_up(options.page_elements, works), " works");
}

/// The range stays the caller's if this throws.
std::shared_ptr<Segment> Pager::Impl::make_segment(std::span<std::byte> range, std::size_t page_bytes,
                                                   SegmentKind kind) {
    std::uint64_t id = 0;
    {
        const std::lock_guard lock(mutex);
        id = next_segment_id++;
    }
    auto segment = std::make_shared<Segment>(owner, range, page_bytes, kind, id);
    memory.set_target(whole_granules(range), segment.get());
    const std::lock_guard lock(mutex);
    segments.emplace(segment.get(), segment);
    return segment;
}

std::shared_ptr<Segment> Pager::create_segment(std::size_t size_bytes, std::size_t element_bytes, SegmentKind kind) {
    OFFLOAD_CHECK(size_bytes > 0 && element_bytes > 0, InvalidArgument, "a segment needs at least one byte");
    impl_->check_page_size(element_bytes);
    const std::span<std::byte> range = impl_->memory.reserve(impl_->whole_granules(size_bytes), nullptr);
    try {
        impl_->memory.hide_from_fork(range, true);
        return impl_->make_segment(range.first(size_bytes), options_.page_elements * element_bytes, kind);
    } catch (...) {
        impl_->memory.release(range);
        throw;
    }
}

/// The memory at the segment's addresses becomes that of its pages. If this throws, nothing is the segment's.
void Pager::Impl::adopt_pages(Segment& segment, std::span<const std::span<std::byte>> slots) {
    const std::lock_guard lock(mutex);
    try {
        rank(segment, predictor->hold());
    } catch (...) {
        segments.erase(&segment);
        throw;
    }
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        Page& page = segment.page(i);
        page.frame = arena.adopt_into_frame(slots[i]);
        page.enter(PageState::mapped, PageWord::kDirty | PageWord::kWritable);
    }
}

/// Addresses for the pages of a range, all or none.
std::vector<std::span<std::byte>> Pager::Impl::reserve_slots(std::span<std::byte> range, std::size_t page_bytes) {
    std::vector<std::span<std::byte>> slots;
    slots.reserve(divide_up(range.size(), page_bytes));
    try {
        for (std::size_t begin = 0; begin < range.size(); begin += page_bytes) {
            slots.push_back(memory.reserve(std::min(page_bytes, range.size() - begin), nullptr));
        }
    } catch (...) {
        for (const std::span<std::byte> slot : slots) memory.release(slot);
        throw;
    }
    return slots;
}

bool Pager::can_adopt_ranges() const noexcept { return !impl_->memory.keeps_place(); }

std::shared_ptr<Segment> Pager::adopt_range(std::span<std::byte> range, std::size_t size_bytes,
                                            std::size_t element_bytes, SegmentRole role) {
    OFFLOAD_CHECK(range.size() == impl_->whole_granules(size_bytes), InvalidArgument, "a range of ", range.size(),
                  " bytes cannot become a segment of ", size_bytes);
    OFFLOAD_CHECK(can_adopt_ranges(), InvalidArgument,
                  "memory that keeps its place cannot become pages that move alone");
    const std::size_t page_bytes = options_.page_elements * element_bytes;
    impl_->check_page_size(element_bytes);
    impl_->memory.hide_from_fork(range, true);
    std::vector<std::span<std::byte>> slots = impl_->reserve_slots(range, page_bytes);
    std::shared_ptr<Segment> segment;
    try {
        segment = impl_->make_segment(range.first(size_bytes), page_bytes, role.kind);
        segment->assume(std::move(role));  // before its pages may be evicted
        impl_->adopt_pages(*segment, slots);
    } catch (...) {
        for (const std::span<std::byte> slot : slots) impl_->memory.release(slot);
        throw;
    }
    impl_->log_use(*segment, 0, segment->page_count(), UseKind::create);
    return segment;
}

std::size_t Pager::set_home(Segment& segment, const std::shared_ptr<const HomeFile>& file, std::uint64_t offset_bytes) {
    std::size_t count = 0;
    for (; count < segment.page_count(); ++count) {
        Page& page = segment.page(count);
        HomePlace home{file, offset_bytes + count * segment.page_bytes()};
        if (!home.can_be_read(segment.page_range(count).size())) break;
        PageWord seen = page.load();
        OFFLOAD_CHECK(seen.state() == PageState::zero && page.change(seen, seen.with(PageState::busy)), LogicError,
                      "page ", count, " of ", segment.label, " has bytes already");
        bool is_read_there = false;
        try {
            is_read_there = impl_->store->set_home(page, std::move(home));
        } catch (...) {
            page.enter(PageState::zero);
            throw;
        }
        page.enter(is_read_there ? PageState::stored : PageState::zero, is_read_there ? PageWord::kStored : 0);
        if (!is_read_there) break;
        const std::lock_guard lock(impl_->mutex);
        impl_->arena.note_wanted(segment.frame_bytes(count));
    }
    if (count > 0) impl_->store->kick();
    return count;
}

/// If the memory cannot be moved, it goes with the segment's addresses.
void Pager::Impl::take_out_of_segment(Page& page) noexcept {
    try {
        unmap_page(page);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(debug, "memory of a page is given up: ", error.what());
        if (!page.frame) return;  // that was done
        const Frame frame = std::exchange(page.frame, Frame{});
        memory.release(frame.slot);
        const std::lock_guard lock(mutex);
        arena.give_up_frame(frame);
    }
}

/// The last owner of the segment is gone, so nothing of it is in flight or pinned. One that was not wholly made has
/// nothing to give back.
void Pager::Impl::forget(Segment& segment) noexcept {
    const std::span<std::byte> range = whole_granules(segment.range());
    memory.set_target(range, nullptr);
    bool is_in_block = false;
    {
        const std::lock_guard lock(mutex);
        if (!segments.contains(&segment)) return;
        is_in_block = arena.has_range(range);
    }
    log_use(segment, 0, segment.page_count(), UseKind::drop);
    release_faulted(segment);
    store->forget(segment);
    const bool is_kept = !memory.keeps_place() && is_whole_in_place(segment) && can_show_to_forks(memory, range);
    if (is_kept) {
        for (std::size_t i = 0; i < segment.page_count(); ++i) memory.release(segment.page(i).frame.slot);
    } else {
        for (std::size_t i = 0; i < segment.page_count(); ++i) {
            if (segment.page(i).load().state() == PageState::mapped) take_out_of_segment(segment.page(i));
        }
        if (!is_in_block) memory.release(range);
    }
    {
        MemoryLock lock(*this);
        for (std::size_t i = 0; i < segment.page_count(); ++i) {
            const Page& page = segment.page(i);
            unwritable.remove(page);
            if (is_kept) {
                arena.return_to_range(page.frame);
            } else if (page.frame) {
                arena.give_frame(page.frame, lock);
            }
        }
        if (is_kept) {
            arena.take_back(range, lock);
        } else if (is_in_block) {
            arena.take_addresses_back(range, lock);
        }
    }
    {
        const std::lock_guard lock(mutex);
        evictable.remove(segment);
        segments.erase(&segment);
    }
    announce_progress();
}

// --- Requests and waits ----------------------------------------------------------------------------------------------

void Pager::prefetch(const std::shared_ptr<Segment>& segment) {
    const std::uint64_t now = impl_->clock.fetch_add(1, std::memory_order_relaxed);
    segment->last_use.store(now, std::memory_order_relaxed);
    PrefetchQueue::Owners changed;  // outlives the lock
    {
        const std::lock_guard lock(impl_->mutex);
        impl_->prefetch_queue.add(segment, now, changed);
    }
    changed.push_back(segment);
    impl_->rank_again(changed);
    impl_->read_requested();
}

void Pager::prefetch_page(const std::shared_ptr<Segment>& segment, std::size_t index) {
    const PageWord word = segment->page(index).load();
    const bool is_missing = word.state() == PageState::stored && !word.has(PageWord::kTransferFailed);
    if (is_missing && !word.has(PageWord::kPending)) impl_->read_ahead_page(segment, index, 0);
}

std::size_t Pager::evict(const std::shared_ptr<Segment>& segment) {
    const InterruptibleWait wait;
    const auto is_moving = [](PageWord seen) {
        const bool is_served = seen.state() == PageState::mapped && seen.has(PageWord::kFaulted);  // and still pinned
        return is_served || seen.state() == PageState::loading || seen.state() == PageState::busy;
    };
    const auto wait_for_move = [&](const Page& page, PageWord seen) {
        impl_->raise_if_late(page, seen);
        const bool is_read = seen.state() == PageState::loading;
        const WaitList::Entry listed(impl_->waits, is_read ? StallCause::read : StallCause::memory, &page);
        impl_->wait_change(page.word, seen.bits, wait);
    };
    std::size_t pinned_bytes = 0;
    for (std::size_t i = 0; i < segment->page_count(); ++i) {
        Page& page = segment->page(i);
        for (PageWord seen = page.load(); is_moving(seen); seen = page.load()) wait_for_move(page, seen);
        if (page.load().pin_count() != 0) impl_->release_faulted(*segment);
        while (page.load().pin_count() != 0 && impl_->wait_for_oldest_use()) {
        }
        if (!impl_->evict_page(page) && page.load().in_memory()) pinned_bytes += segment->frame_bytes(i);
    }
    for (std::size_t i = 0; i < segment->page_count(); ++i) {
        Page& page = segment->page(i);
        for (PageWord seen = page.load(); seen.state() == PageState::evicting; seen = page.load()) {
            wait_for_move(page, seen);
        }
    }
    impl_->raise_write_error(segment.get());
    impl_->store->evict(*segment);
    return pinned_bytes;
}

void Pager::raise_fault_error() { impl_->raise_fault_error(); }

void Pager::flush() {
    const InterruptibleWait wait;  // of all of it: some progress may be made while one transfer does not end
    {
        const ReadAheadPause pause(impl_->flushers);
        while (impl_->is_anything_moving()) {
            const WaitList::Entry listed(impl_->waits, StallCause::memory);
            const std::uint32_t seen = impl_->progress.load(std::memory_order_acquire);
            if (!impl_->is_anything_moving()) break;
            impl_->wait_change(impl_->progress, seen, wait);
        }
    }
    impl_->store->kick();  // what stood back
    impl_->raise_fault_error();
    impl_->raise_unsaid_write_error();
}

std::span<std::byte> Pager::copied_range(Segment& segment, std::size_t index) {
    const std::span<std::byte> range = segment.page_range(index);
    return impl_->memory.keeps_place() ? segment.page(index).frame.slot.first(range.size()) : range;
}

bool Pager::is_resident(const Segment& segment) const noexcept {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        if (!segment.page(i).load().in_memory()) return false;
    }
    return true;
}

// --- Temporaries --------------------------------------------------------------------------------------------------

std::span<std::byte> Pager::allocate_range(std::size_t size_bytes) {
    return impl_->acquire_range(impl_->whole_granules(size_bytes));
}

void Pager::free_range(std::span<std::byte> range) noexcept { impl_->end_use({impl_->fence_use(), {}, range}); }

void Pager::reserve_small(std::size_t size_bytes) { impl_->acquire_small(size_bytes); }

void Pager::count_small(std::ptrdiff_t delta_bytes) noexcept {
    {
        const std::lock_guard lock(impl_->mutex);
        impl_->arena.count_small(delta_bytes);
    }
    if (delta_bytes < 0) impl_->announce_progress();
}

// --- The trace ----------------------------------------------------------------------------------------------------

TraceId Pager::new_trace_id() {
    const std::lock_guard lock(impl_->mutex);
    impl_->roles.emplace_back();
    return static_cast<TraceId>(impl_->roles.size() - 1);
}

void Pager::set_anchor(Segment& segment, TraceId anchor) {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->follows) impl_->note_anchor(segment, anchor);
    segment.anchor_id = anchor;
    if (segment.eviction_rank) impl_->rank(segment, impl_->predictor->hold());
}

void Pager::touch(const std::shared_ptr<Segment>& segment) {
    segment->last_use.store(impl_->clock.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
    if (const auto since = segment->outstanding_since.load(std::memory_order_relaxed)) {
        impl_->end_requests(since);
    } else if (const auto left = segment->requested_uses.load(std::memory_order_relaxed)) {
        segment->requested_uses.store(left - 1, std::memory_order_relaxed);
    }
    if (segment->trace_id == kNoTrace) return;
    {
        const std::lock_guard lock(impl_->mutex);
        UsePredictor::Held uses = impl_->predictor->hold();
        if (!impl_->follows) uses.note_use(segment->trace_id, impl_->arena.take_other_peak_bytes());
        give_role(*impl_, segment);
        if (segment->eviction_rank) impl_->rank(*segment, uses);
    }
    impl_->kick_if_due();
}

void Pager::tell_next_use(Segment& segment, UsePosition use) {
    const std::lock_guard lock(impl_->mutex);
    segment.told_use.store(use, std::memory_order_relaxed);
    if (segment.eviction_rank) impl_->rank(segment, impl_->predictor->hold());
}

void Pager::follow(std::shared_ptr<UsePredictor> above) {
    above->leave_out(impl_->stalls);
    const std::lock_guard lock(impl_->mutex);
    impl_->predictor = std::move(above);
    impl_->follows = true;
    impl_->rank_all(impl_->predictor->hold());
}

void Pager::kick() { impl_->kick_if_due(); }

void Pager::start_use_log() {
    {
        const std::lock_guard lock(impl_->mutex);
        impl_->arena.take_logged_peak_bytes();  // of what was before the list
    }
    impl_->use_log.switch_on();
}

std::vector<UseEvent> Pager::take_use_log() { return impl_->use_log.take(); }

void Pager::Impl::log_use(const Segment& segment, std::size_t first, std::size_t count, UseKind kind) noexcept {
    if (!use_log.is_on()) return;
    ArenaUsage usage;
    std::size_t peak_bytes = 0;
    {
        const std::lock_guard lock(mutex);
        usage = arena.usage();
        peak_bytes = arena.take_logged_peak_bytes();
    }
    use_log.add({segment.id(), first, count, segment.page_bytes(), segment.size_bytes(),
                 usage.range_bytes + usage.small_bytes + usage.reserve_bytes, peak_bytes + usage.reserve_bytes, kind});
}

void Pager::expect_pass(ProgramId program, std::span<const std::shared_ptr<Segment>> segments) {
    std::vector<TraceId> order;
    order.reserve(segments.size());
    const std::lock_guard lock(impl_->mutex);
    for (const std::shared_ptr<Segment>& segment : segments) {
        if (segment->trace_id == kNoTrace) continue;
        give_role(*impl_, segment);
        order.push_back(segment->trace_id);
    }
    impl_->predictor->hold().expect(program, order);
}

void Pager::begin_pass(ProgramId program) {
    impl_->store->begin_pass(program);
    {
        const std::lock_guard lock(impl_->mutex);
        UsePredictor::Held uses = impl_->predictor->hold();
        if (impl_->follows || !uses.begin_pass(program)) return;
        impl_->rank_all(uses);
    }
    if (impl_->use_log.is_on()) impl_->use_log.add({.kind = UseKind::pass});
    impl_->store->kick();
}

void Pager::end_step() {
    if (impl_->use_log.is_on()) impl_->use_log.add({.kind = UseKind::pass});
    {
        const std::lock_guard lock(impl_->mutex);
        UsePredictor::Held uses = impl_->predictor->hold();
        if (!impl_->follows) uses.end_step();
        impl_->rank_all(uses);
    }
    AddressSpace::process().ensure_handler_installed();
    if (impl_->shared) impl_->shared->end_step();
    impl_->store->kick();
    impl_->store->end_step();
    impl_->raise_unsaid_write_error();
}

PagerStatistics Pager::statistics() const {
    PagerStatistics result;
    {
        const std::lock_guard lock(impl_->mutex);
        result.memory = impl_->arena.usage();
    }
    if (impl_->shared) result.share = impl_->shared->statistics();
    result.store = impl_->store->statistics();
    for (std::size_t kind = 0; kind < kSegmentKindCount; ++kind) {
        result.read_bytes[kind] = impl_->read_bytes[kind].get();
        result.written_bytes[kind] = impl_->written_bytes[kind].get();
    }
    for (std::size_t cause = 0; cause < kStallCauseCount; ++cause) {
        result.stall_ns[cause] = impl_->stalls->ns[cause].get();
    }
    result.updates_in_rank_waits = impl_->service->updates_in_rank_waits();
    result.own_update_ns = impl_->own_updates.get();
    result.pins = impl_->tally.accessed();
    result.misses = impl_->misses.get();
    result.faults = impl_->faults.get();
    result.evictions = impl_->evictions.get();
    result.clean_drops = impl_->clean_drops.get();
    result.prefetches = impl_->prefetches.get();
    return result;
}

}  // namespace torch_offload
