#include "device/address_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <random>
#include <vector>

namespace torch_offload {
namespace {

constexpr std::size_t kArenaBytes = 64 * kMiB;

FaultTarget* target_number(std::uintptr_t number) { return reinterpret_cast<FaultTarget*>(number * 16); }

// A block wastes at most an eighth of its addresses plus one unit. Method: many sizes, the bound computed.
TEST(AddressArena, BlocksAreAtMostAnEighthLargerThanAsked) {
    std::mt19937_64 random(1);
    for (int i = 0; i < 10000; ++i) {
        const std::size_t size = 1 + random() % (std::size_t{1} << (1 + random() % 40));
        const std::size_t unit = size < kHugePageBytes ? kAddressGranuleBytes : kHugePageBytes;
        EXPECT_GE(AddressArena::block_bytes(size), size);
        EXPECT_LE(AddressArena::block_bytes(size), size + size / 8 + unit);
        EXPECT_EQ(AddressArena::block_bytes(size) % unit, 0u);
    }
}

// Blocks in use never overlap and large ones are aligned. Method: random take and give_back, every granule counted.
TEST(AddressArena, BlocksInUseAreDisjointAndAligned) {
    AddressArena arena(kArenaBytes);
    std::mt19937_64 random(2);
    std::vector<bool> used(kArenaBytes / kAddressGranuleBytes, false);
    std::vector<std::array<std::size_t, 2>> blocks;
    const auto mark = [&](std::size_t offset, std::size_t size, bool value) {
        for (std::size_t i = offset; i < offset + size; i += kAddressGranuleBytes) {
            ASSERT_NE(used[i / kAddressGranuleBytes], value);
            used[i / kAddressGranuleBytes] = value;
        }
    };
    for (int i = 0; i < 2000; ++i) {
        if (blocks.size() < 8) {
            const std::size_t size = 1 + random() % (4 * kMiB);
            const std::optional<std::size_t> offset = arena.take(size);
            if (!offset) break;  // classes are never joined, so a small arena fills up
            EXPECT_EQ(*offset % (size < kHugePageBytes ? kAddressGranuleBytes : kHugePageBytes), 0u);
            mark(*offset, size, true);
            blocks.push_back({*offset, size});
        } else {
            std::swap(blocks[random() % blocks.size()], blocks.back());
            const auto [offset, size] = blocks.back();
            mark(offset, size, false);
            EXPECT_TRUE(arena.give_back(offset, size));
            blocks.pop_back();
        }
    }
}

// Sizes of one class share addresses. Method: 1000 distinct sizes in an arena with room for four blocks.
TEST(AddressArena, ManyDistinctSizesOfOneClassReuseOneBlock) {
    AddressArena arena(4 * 16 * kMiB);
    for (std::size_t i = 0; i < 1000; ++i) {
        const std::size_t size = 14 * kMiB + 1 + i * 512;
        const std::optional<std::size_t> offset = arena.take(size);
        ASSERT_TRUE(offset.has_value()) << size;
        EXPECT_TRUE(arena.give_back(*offset, size));
    }
}

// Exhaustion is an answer, not a wrong block. Method: fill the arena, take once more, free one, take again.
TEST(AddressArena, FullArenaGivesNothing) {
    AddressArena arena(3 * kHugePageBytes);
    const std::optional<std::size_t> first = arena.take(kHugePageBytes);
    ASSERT_TRUE(arena.take(kSectorBytes).has_value());
    EXPECT_FALSE(arena.take(kHugePageBytes).has_value());
    EXPECT_FALSE(arena.take(kArenaBytes).has_value());
    EXPECT_FALSE(arena.take(0).has_value());
    EXPECT_TRUE(arena.give_back(*first, kHugePageBytes));
    EXPECT_EQ(arena.take(kHugePageBytes), first);
}

// Only a taken block can be given back, once, with its size. Method: wrong size, wrong offset, twice.
TEST(AddressArena, WrongBlocksAreNotGivenBack) {
    AddressArena arena(kArenaBytes);
    const std::size_t offset = *arena.take(5 * kSectorBytes);
    EXPECT_FALSE(arena.give_back(offset, 4 * kSectorBytes));
    EXPECT_FALSE(arena.give_back(offset - kAddressGranuleBytes, 5 * kSectorBytes));
    EXPECT_EQ(arena.taken_count(), 1u);
    EXPECT_TRUE(arena.give_back(offset, 5 * kSectorBytes));
    EXPECT_FALSE(arena.give_back(offset, 5 * kSectorBytes));
}

// What lies in a block that is taken is told from what does not. Method: parts at both ends, over an end, after the
// end.
TEST(AddressArena, PartsOfTakenBlocksAreKnown) {
    AddressArena arena(kArenaBytes);
    const std::size_t offset = *arena.take(5 * kSectorBytes);
    EXPECT_TRUE(arena.is_part_of_taken(offset, kSectorBytes));
    EXPECT_TRUE(arena.is_part_of_taken(offset + 4 * kSectorBytes, kSectorBytes));
    EXPECT_FALSE(arena.is_part_of_taken(offset + 4 * kSectorBytes, 2 * kSectorBytes));
    EXPECT_FALSE(arena.is_part_of_taken(offset - kSectorBytes, 2 * kSectorBytes));
    EXPECT_TRUE(arena.give_back(offset, 5 * kSectorBytes));
    EXPECT_FALSE(arena.is_part_of_taken(offset, kSectorBytes));
}

// A range ends at its last sector, not at its granule. Method: neighbours in the table, looked up at every edge.
TEST(FaultTable, FindsTheTargetOfEverySectorAndNoMore) {
    alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> zeros{};
    constexpr std::size_t kTableArenaBytes = 16 * kMiB;
    ASSERT_LE(FaultTable::bytes_for(kTableArenaBytes), zeros.size());
    FaultTable table(zeros.data(), kTableArenaBytes);
    constexpr std::size_t kRangeBytes = kAddressGranuleBytes + 3 * kSectorBytes;
    table.set(0, kRangeBytes, target_number(1));
    table.set(2 * kAddressGranuleBytes, kAddressGranuleBytes, target_number(2));
    EXPECT_EQ(table.find(0), target_number(1));
    EXPECT_EQ(table.find(kRangeBytes - 1), target_number(1));
    EXPECT_EQ(table.find(kRangeBytes), nullptr);
    EXPECT_EQ(table.find(2 * kAddressGranuleBytes), target_number(2));
    EXPECT_EQ(table.find(3 * kAddressGranuleBytes - 1), target_number(2));
    EXPECT_EQ(table.find(3 * kAddressGranuleBytes), nullptr);
    table.set(0, kRangeBytes, nullptr);
    EXPECT_EQ(table.find(0), nullptr);
}

// Ranges may share a granule of addresses, come and go in any order, and the granule can be one range's again. Method:
// random ranges of sectors in an arena of a few granules beside an array with a target a sector.
TEST(FaultTable, RangesShareGranules) {
    constexpr std::size_t kSectors = 4 * kAddressGranuleBytes / kSectorBytes;
    std::vector<std::byte> zeros(FaultTable::bytes_for(kSectors * kSectorBytes));
    FaultTable table(zeros.data(), kSectors * kSectorBytes);
    std::vector<std::uintptr_t> expected(kSectors, 0);
    std::vector<std::array<std::size_t, 2>> ranges;
    std::mt19937_64 random(3);
    for (std::uintptr_t step = 1; step <= 2000; ++step) {
        const std::size_t first = random() % kSectors;
        const std::size_t count = 1 + random() % std::min<std::size_t>(40, kSectors - first);
        const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(first);
        if (std::all_of(begin, begin + static_cast<std::ptrdiff_t>(count), [](auto id) { return id == 0; })) {
            table.set(first * kSectorBytes, count * kSectorBytes, target_number(step));
            std::fill_n(begin, count, step);
            ranges.push_back({first, count});
        } else if (!ranges.empty()) {
            std::swap(ranges[random() % ranges.size()], ranges.back());
            const auto [gone, gone_count] = ranges.back();
            table.set(gone * kSectorBytes, gone_count * kSectorBytes, nullptr);
            std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(gone), gone_count, 0);
            ranges.pop_back();
        }
        for (std::size_t i = 0; i < kSectors; ++i) {
            ASSERT_EQ(table.find(i * kSectorBytes + 17), target_number(expected[i])) << "step " << step << ", " << i;
        }
    }
}

}  // namespace
}  // namespace torch_offload
