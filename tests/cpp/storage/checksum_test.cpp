#include "storage/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <set>

#include "support/aligned_buffer.h"

namespace torch_offload::test {
namespace {

// The checksum is XXH3-64 with the seed of FORMAT.md, on every machine. Method: the library's plain function with the
// seed computed here, and one number from another implementation.
TEST(Checksum, IsWhatTheFormatSays) {
    const auto mix = [](std::uint64_t value) {
        value += 0x9e3779b97f4a7c15;
        value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
        value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
        return value ^ (value >> 31);
    };
    for (const std::size_t size_bytes : {4 * kKiB, 64 * kKiB, 4 * kMiB}) {
        AlignedBuffer page(size_bytes);
        page.fill(size_bytes);
        const std::uint64_t seed = mix(mix(mix(7) ^ 8) ^ 9);
        EXPECT_EQ(page_checksum(page.bytes(), {7, 8, 9}), XXH3_64bits_withSeed(page.bytes().data(), size_bytes, seed));
    }
    const AlignedBuffer zeros(kSectorBytes);
    EXPECT_EQ(page_checksum(zeros.bytes(), {1, 2, 3}), 0x1a29bd47467e25aau);
}

// Any changed bit changes the checksum. Method: flip every bit of a sector, one at a time.
TEST(Checksum, SeesEveryBit) {
    AlignedBuffer page(kSectorBytes);
    page.fill(1);
    const std::uint64_t right = page_checksum(page.bytes(), {});
    for (std::size_t bit = 0; bit < 8 * kSectorBytes; ++bit) {
        const auto mask = std::byte{1} << (bit % 8);
        page.bytes()[bit / 8] ^= mask;
        ASSERT_NE(page_checksum(page.bytes(), {}), right) << bit;
        page.bytes()[bit / 8] ^= mask;
    }
    EXPECT_EQ(page_checksum(page.bytes(), {}), right);
}

// The right bytes of another page, version or store are a mismatch. Method: all identities of a 20 x 20 x 20 cube,
// also with numbers exchanged, over the same bytes.
TEST(Checksum, BindsTheIdentity) {
    const AlignedBuffer zeros(kSectorBytes);
    std::set<std::uint64_t> seen;
    for (std::uint64_t store = 0; store < 20; ++store) {
        for (std::uint64_t page = 0; page < 20; ++page) {
            for (std::uint64_t version = 0; version < 20; ++version) {
                EXPECT_TRUE(seen.insert(page_checksum(zeros.bytes(), {store, page, version})).second);
            }
        }
    }
    EXPECT_EQ(seen.size(), 8000u);
}

}  // namespace
}  // namespace torch_offload::test
