#include "fuzz/fuzzed_extent.h"

#include <sanitizer/allocator_interface.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>

namespace torch_offload {
namespace {

/// Of the thread that a limit watches.
thread_local bool is_watched = false;
thread_local std::size_t allowed_bytes = 0;

void count(const volatile void*, std::size_t size_bytes) {
    if (!is_watched) return;
    is_watched = size_bytes <= allowed_bytes;
    require(is_watched, "no more memory is asked for than the size of the input allows");
    allowed_bytes -= size_bytes;
}

void ignore(const volatile void*) {}

// Offsets of FORMAT.md.
constexpr std::size_t kChecksumAt = 8;
constexpr std::size_t kHashedFrom = 16;
constexpr std::size_t kExtentSizeAt = 24;

template <typename Number>
void put(std::span<std::byte> bytes, std::size_t offset, Number number) {
    std::memcpy(bytes.data() + offset, &number, sizeof(number));
}

}  // namespace

FuzzedExtent::FuzzedExtent(std::span<const std::uint8_t> input)
    : buffer_(std::max<std::size_t>(1, (input.size() + kExtentAlignment - 1) / kExtentAlignment) * kExtentAlignment) {
    if (input.empty()) return;
    const std::span<std::byte> bytes = buffer_.bytes();
    std::ranges::copy(std::as_bytes(input.subspan(1)), bytes.begin());
    if (input[0] & kRepairsSizes) put(bytes, kExtentSizeAt, std::uint64_t{bytes.size()});
    if (input[0] & kRepairsChecksum) {
        put(bytes, kChecksumAt, std::uint64_t{XXH3_64bits(bytes.data() + kHashedFrom, bytes.size() - kHashedFrom)});
    }
}

void require(bool holds, std::string_view claim) {
    if (holds) return;
    std::cerr << "does not hold: " << claim << std::endl;
    std::abort();
}

AllocationLimit::AllocationLimit(std::size_t most_bytes) {
    static const int is_installed = __sanitizer_install_malloc_and_free_hooks(count, ignore);
    require(is_installed != 0, "the sanitizer tells what is asked for");
    allowed_bytes = most_bytes;
    is_watched = true;
}

AllocationLimit::~AllocationLimit() { is_watched = false; }

std::size_t most_bytes_of_header(std::span<const std::byte> extent) { return 2 * extent.size() + 4096; }

std::size_t most_bytes_of_opening(std::span<const std::byte> extent) {
    // Of each class 256 KiB of words, and to make them a tree and its words, twice that.
    constexpr std::size_t kClassBytes = std::size_t{2} << 20;
    return most_bytes_of_header(extent) + kMaxClasses * kClassBytes;
}

}  // namespace torch_offload
