#include "storage/checksum.h"

#include <xxhash.h>

// The library's own choice of instruction set at run time. Weak: absent where the library was built without it.
extern "C" __attribute__((weak)) XXH64_hash_t XXH3_64bits_withSeed_dispatch(const void* input, std::size_t size_bytes,
                                                                            XXH64_hash_t seed);

namespace torch_offload {
namespace {

/// The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014):
/// a bijection, so two identities that differ in one number never share a seed.
constexpr std::uint64_t mix(std::uint64_t value) noexcept {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

}  // namespace

std::uint64_t page_checksum(std::span<const std::byte> bytes, const PageIdentity& identity) noexcept {
    const std::uint64_t seed = mix(mix(mix(identity.store_id) ^ identity.page_id) ^ identity.version);
    const auto hash = XXH3_64bits_withSeed_dispatch != nullptr ? XXH3_64bits_withSeed_dispatch : XXH3_64bits_withSeed;
    return hash(bytes.data(), bytes.size(), seed);
}

}  // namespace torch_offload
