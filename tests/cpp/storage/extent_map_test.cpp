#include "storage/extent_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/check.h"

namespace torch_offload::test {
namespace {

// The smallest hole that fits is taken, of equals the lowest. Method: three holes, three takes.
TEST(ExtentMap, TakesTheSmallestHoleThatFits) {
    ExtentMap map;
    map.add(0, 300);
    map.add(1000, 100);
    map.add(2000, 100);
    EXPECT_EQ(map.take(100), 1000u);
    EXPECT_EQ(map.take(80), 2000u);
    EXPECT_EQ(map.take(200), 0u);
    EXPECT_EQ(map.take(200), std::nullopt);
    EXPECT_EQ(map.free_bytes(), 120u);
}

// Neighbouring holes become one, whatever the order they come in. Method: all six orders of three neighbours.
TEST(ExtentMap, NeighboursAreJoined) {
    std::vector<std::uint64_t> order{0, 100, 200};
    do {
        ExtentMap map;
        for (const std::uint64_t offset_bytes : order) map.add(offset_bytes, 100);
        EXPECT_EQ(map.hole_count(), 1u);
        EXPECT_EQ(map.take(300), 0u);
    } while (std::ranges::next_permutation(order).found);
}

// What is free already cannot be freed, and no more than was taken. Method: the same, inside, over either edge, around,
// past the last byte, with and without something taken; all of the rest as new space.
TEST(ExtentMap, DoubleFreeIsADefect) {
    ExtentMap map;
    map.add(100, 110);
    EXPECT_THROW(map.release(0, 50), LogicError);
    EXPECT_EQ(map.take(10), 100u);
    for (const auto give : {&ExtentMap::add, &ExtentMap::release}) {
        EXPECT_THROW((map.*give)(110, 100), LogicError);
        EXPECT_THROW((map.*give)(120, 10), LogicError);
        EXPECT_THROW((map.*give)(60, 51), LogicError);
        EXPECT_THROW((map.*give)(209, 10), LogicError);
        EXPECT_THROW((map.*give)(0, 1000), LogicError);
        EXPECT_THROW((map.*give)(~std::uint64_t{0}, 2), LogicError);
        EXPECT_THROW((map.*give)(300, 0), LogicError);
    }
    EXPECT_THROW(map.take(0), LogicError);
    EXPECT_EQ(map.free_bytes(), 100u);
    map.release(100, 10);
    EXPECT_THROW(map.release(0, 50), LogicError);
    map.add(0, 100);
    map.add(210, 1);
    EXPECT_EQ(map.hole_count(), 1u);
}

// Extents never overlap and no byte is lost. Method: 200 seeds of random takes and frees against a byte map.
TEST(ExtentMap, AgreesWithAByteMap) {
    constexpr std::size_t kBytes = 512;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        std::mt19937_64 random(seed);
        ExtentMap map;
        map.add(0, kBytes);
        std::vector<bool> used(kBytes, false);
        std::vector<std::pair<std::uint64_t, std::size_t>> extents;
        std::size_t used_bytes = 0;
        for (int step = 0; step < 300; ++step) {
            const std::size_t size_bytes = 1 + random() % 40;
            if (random() % 2 == 0) {
                const auto offset_bytes = map.take(size_bytes);
                if (!offset_bytes) continue;
                for (std::size_t i = 0; i < size_bytes; ++i) {
                    ASSERT_FALSE(used[*offset_bytes + i]) << "seed " << seed;
                    used[*offset_bytes + i] = true;
                }
                extents.emplace_back(*offset_bytes, size_bytes);
                used_bytes += size_bytes;
            } else if (!extents.empty()) {
                std::swap(extents[random() % extents.size()], extents.back());
                const auto [offset_bytes, freed_bytes] = extents.back();
                extents.pop_back();
                map.release(offset_bytes, freed_bytes);
                for (std::size_t i = 0; i < freed_bytes; ++i) used[offset_bytes + i] = false;
                used_bytes -= freed_bytes;
            }
            ASSERT_EQ(map.free_bytes(), kBytes - used_bytes) << "seed " << seed;
        }
        for (const auto& [offset_bytes, size_bytes] : extents) map.release(offset_bytes, size_bytes);
        ASSERT_EQ(map.hole_count(), 1u) << "seed " << seed;
        ASSERT_EQ(map.take(kBytes), 0u);
    }
}

}  // namespace
}  // namespace torch_offload::test
