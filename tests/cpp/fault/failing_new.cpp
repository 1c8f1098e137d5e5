// operator new that fails when asked to, and counts what is alive.
#include <cstdlib>
#include <new>

#include "fault/injector.h"

namespace torch_offload::test {
namespace {

std::atomic<std::int64_t> live{0};

void* counted(void* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    live.fetch_add(1, std::memory_order_relaxed);
    return memory;
}

}  // namespace

std::int64_t live_blocks() noexcept { return live.load(); }

void* allocate(std::size_t size) {
    if (is_due(FaultCall::allocation)) throw std::bad_alloc();
    return counted(std::malloc(size == 0 ? 1 : size));
}

void* allocate_aligned(std::size_t size, std::align_val_t alignment) {
    if (is_due(FaultCall::allocation)) throw std::bad_alloc();
    const auto bytes = static_cast<std::size_t>(alignment);
    return counted(std::aligned_alloc(bytes, (size + bytes - 1) / bytes * bytes));
}

void give_back(void* memory) noexcept {
    if (memory == nullptr) return;
    live.fetch_sub(1, std::memory_order_relaxed);
    std::free(memory);
}

}  // namespace torch_offload::test

using torch_offload::test::allocate;
using torch_offload::test::allocate_aligned;
using torch_offload::test::give_back;

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, std::align_val_t alignment) { return allocate_aligned(size, alignment); }
void* operator new[](std::size_t size, std::align_val_t alignment) { return allocate_aligned(size, alignment); }
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete[](void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { give_back(memory); }
