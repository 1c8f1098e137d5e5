#include "autograd/temporaries.h"

#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace torch_offload {
namespace {

constexpr std::size_t kShardCount = 16;
constexpr unsigned kAddressShift = 12;  // ranges start at sectors

struct Shard {
    std::mutex mutex;  // a leaf
    std::unordered_map<const void*, Temporary> temporaries;
};

Shard& shard_of(const void* address) {
    static auto* const shards = new std::array<Shard, kShardCount>;  // never destroyed: memory is freed until the end
    return (*shards)[(reinterpret_cast<std::uintptr_t>(address) >> kAddressShift) % kShardCount];
}

}  // namespace

void add_temporary(Temporary temporary) {
    const void* address = temporary.range.data();
    Shard& shard = shard_of(address);
    const std::lock_guard lock(shard.mutex);
    shard.temporaries.insert_or_assign(address, std::move(temporary));
}

std::optional<Temporary> find_temporary(const void* address) {
    Shard& shard = shard_of(address);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.temporaries.find(address);
    if (found == shard.temporaries.end()) return std::nullopt;
    return found->second;
}

std::optional<Temporary> take_temporary(const void* address) {
    Shard& shard = shard_of(address);
    const std::lock_guard lock(shard.mutex);
    auto node = shard.temporaries.extract(address);
    if (node.empty()) return std::nullopt;
    return std::move(node.mapped());
}

}  // namespace torch_offload
