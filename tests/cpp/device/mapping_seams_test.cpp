#include "device/mapping_seams.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <vector>

namespace torch_offload {
namespace {

std::byte addresses[64];

std::span<std::byte> range(std::size_t begin, std::size_t end) {
    return std::span(addresses).subspan(begin, end - begin);
}

std::vector<std::size_t> sizes_of(const MappingSeams& seams, std::span<std::byte> range) {
    std::vector<std::size_t> sizes;
    for (const std::span<std::byte> piece : seams.pieces_of(range)) sizes.push_back(piece.size());
    return sizes;
}

using Sizes = std::vector<std::size_t>;

// Memory that came as one range is one piece, and so is any part of it; neighbors are cut where they meet. Method: two
// neighbors, ranges within one, over both, over a part of each.
TEST(MappingSeams, NeighborsAreCutWhereTheyMeet) {
    MappingSeams seams;
    seams.add(range(0, 16));
    seams.add(range(16, 24));
    EXPECT_EQ(sizes_of(seams, range(0, 16)), Sizes({16}));
    EXPECT_EQ(sizes_of(seams, range(4, 8)), Sizes({4}));
    EXPECT_EQ(sizes_of(seams, range(0, 24)), Sizes({16, 8}));
    EXPECT_EQ(sizes_of(seams, range(12, 20)), Sizes({4, 4}));
}

// Seams go along with the memory, and leave none behind. Method: move two neighbors; new memory over where they were.
TEST(MappingSeams, SeamsMoveWithTheMemory) {
    MappingSeams seams;
    seams.add(range(0, 16));
    seams.add(range(16, 24));
    seams.add_moved(range(8, 24), addresses + 40);
    seams.forget(range(8, 24));
    EXPECT_EQ(sizes_of(seams, range(40, 56)), Sizes({8, 8}));
    seams.add(range(8, 24));
    EXPECT_EQ(sizes_of(seams, range(0, 24)), Sizes({8, 16}));
}

// What comes to lie within other memory is cut out of it. Method: new memory in the middle of a range; ends alone.
TEST(MappingSeams, NewMemoryWithinOtherHasTwoEnds) {
    MappingSeams seams;
    seams.add(range(0, 24));
    seams.forget(range(8, 12));
    seams.add(range(8, 12));
    EXPECT_EQ(sizes_of(seams, range(0, 24)), Sizes({8, 4, 12}));
    seams.add(range(0, 24));
    EXPECT_EQ(sizes_of(seams, range(0, 24)), Sizes({24}));
    seams.add_ends(range(4, 8));
    EXPECT_EQ(sizes_of(seams, range(0, 24)), Sizes({4, 4, 16}));
}

}  // namespace
}  // namespace torch_offload
