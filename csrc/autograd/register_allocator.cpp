#include "autograd/register_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>

#include "autograd/engine.h"
#include "autograd/error_bridge.h"
#include "autograd/forked_child.h"
#include "autograd/temporaries.h"
#include "device/address_space.h"

namespace torch_offload {
namespace {

constexpr std::uint8_t kPriority = 100;

// Small allocations reach the pager's account in lumps, so that each costs two atomic operations and no lock.
constexpr std::size_t kMaxReportBytes = kMiB;
constexpr std::size_t kReportShare = 256;  // of the budget

thread_local int bypass_depth = 0;

// A report can make the pager drop pages, and with a segment's record go small tensors: not a reason to report.
thread_local bool is_reporting = false;

}  // namespace

AllocatorBypass::AllocatorBypass() noexcept { ++bypass_depth; }
AllocatorBypass::~AllocatorBypass() { --bypass_depth; }

RegisterAllocator& RegisterAllocator::process() {
    static RegisterAllocator* const allocator = new RegisterAllocator;
    return *allocator;
}

/// Only torch's own allocator is known to hand out what malloc knows the size of.
RegisterAllocator::RegisterAllocator()
    : previous_(c10::GetCPUAllocator()),
      previous_deleter_(previous_ == c10::GetDefaultCPUAllocator() ? previous_->raw_deleter() : nullptr) {}

void RegisterAllocator::install(std::shared_ptr<Engine> engine) {
    remove_any();
    const std::size_t share_bytes = engine->pager().options().budget_bytes / kReportShare;
    report_bytes_.store(static_cast<std::ptrdiff_t>(std::clamp(share_bytes, kSectorBytes, kMaxReportBytes)));
    small_bytes_.store(0, std::memory_order_relaxed);  // what lives already is not the new engine's
    engine_.store(std::move(engine));
    report_small();
    c10::SetCPUAllocator(this, kPriority);
}

void RegisterAllocator::remove(const Engine& engine) {
    const std::shared_ptr<Engine> installed = engine_.load();
    if (installed.get() != &engine) return;
    engine_.store(nullptr);
    const std::lock_guard lock(report_mutex_);
    installed->pager().count_small(-std::exchange(reported_bytes_, 0));
}

void RegisterAllocator::remove_any() {
    if (const std::shared_ptr<Engine> installed = engine_.load()) remove(*installed);
}

c10::DataPtr RegisterAllocator::allocate(std::size_t size_bytes) {
    if (size_bytes >= kLargeAllocationBytes && bypass_depth == 0 && !in_forked_child()) {
        if (std::shared_ptr<Engine> engine = engine_.load()) return allocate_large(std::move(engine), size_bytes);
    }
    c10::DataPtr small = previous_->allocate(size_bytes);
    if (previous_deleter_ && small.compare_exchange_deleter(previous_deleter_, &free_memory) && small) {
        count_small(static_cast<std::ptrdiff_t>(malloc_usable_size(small.get())));
    }
    return small;
}

c10::DataPtr RegisterAllocator::allocate_large(std::shared_ptr<Engine> engine, std::size_t size_bytes) {
    const std::span<std::byte> range = across_torch([&] { return engine->allocate_range(size_bytes); });
    add_temporary({std::move(engine), range});
    return {range.data(), range.data(), &free_memory, c10::Device(c10::kCPU)};
}

void RegisterAllocator::copy_data(void* target, const void* source, std::size_t size_bytes) const {
    default_copy_data(target, source, size_bytes);
}

/// A forked child's copy of a temporary goes with the process: the pager that would take it back is the parent's.
void RegisterAllocator::free_memory(void* address) {
    if (!address) return;
    RegisterAllocator& allocator = process();
    if (AddressSpace::process().contains(address)) {
        if (in_forked_child()) return;
        if (const std::optional<Temporary> temporary = take_temporary(address)) {
            temporary->engine->pager().free_range(temporary->range);
        }
        return;
    }
    const auto size_bytes = static_cast<std::ptrdiff_t>(malloc_usable_size(address));
    allocator.previous_deleter_(address);
    allocator.count_small(-size_bytes);
}

void RegisterAllocator::count_small(std::ptrdiff_t delta_bytes) {
    const std::ptrdiff_t now = small_bytes_.fetch_add(delta_bytes, std::memory_order_relaxed) + delta_bytes;
    const std::ptrdiff_t last = last_report_bytes_.load(std::memory_order_relaxed);
    if (std::abs(now - last) >= report_bytes_.load(std::memory_order_relaxed)) report_small();
}

void RegisterAllocator::report_small() {
    if (is_reporting || in_forked_child()) return;  // the pager's lock may have been held when the process forked
    const std::shared_ptr<Engine> engine = engine_.load();
    if (!engine) return;
    // A report may wait for pages to leave. Whoever comes meanwhile leaves its bytes to the next report: it may be the
    // thread that the waiting one waits for.
    const std::unique_lock lock(report_mutex_, std::try_to_lock);
    if (!lock) return;
    // Below zero only by what was allocated raw before the installation and freed after it.
    const std::ptrdiff_t now = std::max<std::ptrdiff_t>(small_bytes_.load(std::memory_order_relaxed), 0);
    last_report_bytes_.store(now, std::memory_order_relaxed);
    is_reporting = true;
    engine->pager().count_small(now - std::exchange(reported_bytes_, now));
    is_reporting = false;
}

}  // namespace torch_offload
