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

// The budget grants small allocations memory in quanta, so that each costs two atomic operations and no lock.
constexpr std::size_t kMaxQuantumBytes = kMiB;
constexpr std::size_t kQuantumShare = 256;  // of the budget
constexpr std::ptrdiff_t kMaxSurplusQuanta = 8;

constexpr std::size_t kTrimStepBytes = 4 * kMiB;
constexpr int kFreeBytesOfHeap = 256 * 1024;  // at its end; more goes back to the system

thread_local int bypass_depth = 0;

// Growing the grant can make the pager drop pages, and with a segment's record go small tensors: no reason to settle.
thread_local bool is_settling = false;

class SettlingScope {
public:
    SettlingScope() noexcept { is_settling = true; }
    ~SettlingScope() { is_settling = false; }
    SettlingScope(const SettlingScope&) = delete;
    SettlingScope& operator=(const SettlingScope&) = delete;
};

/// Left alone, glibc keeps up to twice the largest block that was ever mapped, in the heap of each thread: of gloo's,
/// whose reductions have buffers of a whole layer.
void keep_heaps_small() {
#ifdef __GLIBC__
    mallopt(M_TRIM_THRESHOLD, kFreeBytesOfHeap);
#endif
}

}  // namespace

void note_heap_freed(std::size_t size_bytes) {
    static std::atomic<std::size_t> waiting_bytes{0};
    if (waiting_bytes.fetch_add(size_bytes, std::memory_order_relaxed) + size_bytes < kTrimStepBytes) return;
    waiting_bytes.store(0, std::memory_order_relaxed);
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

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
    keep_heaps_small();
    const std::size_t share_bytes = engine->pager().options().budget_bytes / kQuantumShare;
    quantum_bytes_.store(static_cast<std::ptrdiff_t>(std::clamp(share_bytes, kSectorBytes, kMaxQuantumBytes)));
    small_bytes_.store(0, std::memory_order_relaxed);  // what lives already is not the new engine's
    engine_.store(std::move(engine));
    settle_grant(GrantChange::any);
    c10::SetCPUAllocator(this, kPriority);
}

void RegisterAllocator::remove(const Engine& engine) {
    const std::shared_ptr<Engine> installed = engine_.load();
    if (installed.get() != &engine) return;
    engine_.store(nullptr);
    const std::lock_guard lock(grant_mutex_);
    installed->pager().count_small(-granted_bytes_.exchange(0));
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
        note_allocated(malloc_usable_size(small.get()));  // if it throws, the allocation goes and is noted as freed
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
    const std::size_t size_bytes = malloc_usable_size(address);
    allocator.previous_deleter_(address);
    allocator.note_freed(size_bytes);
}

void RegisterAllocator::note_allocated(std::size_t size_bytes) {
    const auto delta_bytes = static_cast<std::ptrdiff_t>(size_bytes);
    const std::ptrdiff_t now = small_bytes_.fetch_add(delta_bytes, std::memory_order_relaxed) + delta_bytes;
    if (now > granted_bytes_.load(std::memory_order_relaxed)) settle_grant(GrantChange::any);
}

void RegisterAllocator::note_freed(std::size_t size_bytes) {
    const auto delta_bytes = static_cast<std::ptrdiff_t>(size_bytes);
    const std::ptrdiff_t now = small_bytes_.fetch_sub(delta_bytes, std::memory_order_relaxed) - delta_bytes;
    const std::ptrdiff_t surplus_bytes =
        granted_bytes_.load(std::memory_order_relaxed) - std::max(now, std::ptrdiff_t{0});
    if (surplus_bytes > kMaxSurplusQuanta * quantum_bytes_.load(std::memory_order_relaxed)) {
        settle_grant(GrantChange::shrink);
    }
}

/// Has the engine's budget hold what small allocations take, and a quantum more. Only growing can throw. A thread that
/// grows the grant may wait for pages to leave; whoever comes meanwhile goes on, its bytes are in the next grant: it
/// may be the thread that the waiting one waits for.
void RegisterAllocator::settle_grant(GrantChange allowed) {
    if (is_settling || in_forked_child()) return;  // the pager's lock may have been held when the process forked
    const std::shared_ptr<Engine> engine = engine_.load();
    if (!engine) return;
    const std::unique_lock lock(grant_mutex_, std::try_to_lock);
    if (!lock) return;
    const SettlingScope scope;
    // Below zero only by what was allocated raw before the installation and freed after it.
    const std::ptrdiff_t now = std::max<std::ptrdiff_t>(small_bytes_.load(std::memory_order_relaxed), 0);
    const std::ptrdiff_t delta_bytes = now + quantum_bytes_.load(std::memory_order_relaxed) - granted_bytes_.load();
    if (delta_bytes > 0 && allowed == GrantChange::shrink) return;
    if (delta_bytes < 0) note_heap_freed(static_cast<std::size_t>(-delta_bytes));
    if (delta_bytes <= 0 || bypass_depth != 0) {
        engine->pager().count_small(delta_bytes);
    } else {
        across_torch([&] { engine->reserve_small(static_cast<std::size_t>(delta_bytes)); });
    }
    granted_bytes_.fetch_add(delta_bytes);
}

}  // namespace torch_offload
