#include "codec/coder_tables.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "codec/ternary_samples.h"

namespace torch_offload {
namespace {

// Experts of alike values share their tables. Method: 32 random matrices, opened one after the other and all kept.
TEST(CoderTables, AreSharedByAlikeExperts) {
    CoderTables tables;
    std::vector<ExtentBuffer> extents;
    std::vector<CodedMatrix> opened;
    for (std::uint64_t seed = 0; seed < 32; ++seed) {
        const Matrix matrix = random_matrix(768, 300, 0.8867, seed);
        extents.push_back(encode(matrix.view(), {.coder = CoderChoice::tun12, .classes = {{0}, {100}}}));
        opened.emplace_back(extents.back().bytes(), tables);
        EXPECT_EQ(decoded(opened.back(), best_instruction_set()), matrix.values);
    }
    EXPECT_LE(tables.made_count(), 2U);
    EXPECT_EQ(tables.table_count(), tables.made_count());
}

constexpr TunstallClass kClasses[] = {
    {{50000, 7000}, WordLimit::w31}, {{50000, 7000}, WordLimit::w63}, {{50000, 7001}, WordLimit::w31}};

// Only so many tables are kept, and what was asked for longest ago goes first; whoever has it keeps it. Method: room
// for two, three kinds.
TEST(CoderTables, DropWhatWasAskedForLongestAgo) {
    CoderTables tables(2);
    const SharedTunstallWords first = tables.words_of(kClasses[0]);
    const SharedTunstallWords second = tables.words_of(kClasses[1]);
    EXPECT_EQ(tables.words_of(kClasses[0]), first);
    tables.words_of(kClasses[2]);
    EXPECT_EQ(tables.words_of(kClasses[0]), first);
    EXPECT_EQ(tables.made_count(), 3U);
    EXPECT_NE(tables.words_of(kClasses[1]), second);
    EXPECT_EQ(tables.made_count(), 4U);
    EXPECT_EQ(tables.table_count(), 2U);
    EXPECT_EQ(second->word_bytes(), 64U);
}

// Threads get the same tables. Method: four threads ask for three kinds at once, again and again, with room for two.
TEST(CoderTables, AreFoundByManyThreads) {
    CoderTables tables(2);
    const auto ask = [&] {
        for (std::size_t i = 0; i < 60; ++i) {
            const TunstallClass& coded = kClasses[i % 3];
            const SharedTunstallWords words = tables.words_of(coded);
            EXPECT_EQ(words->word_bytes(), static_cast<std::size_t>(coded.limit) + 1);
        }
    };
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 4; ++i) threads.emplace_back(ask);
    }
    EXPECT_EQ(tables.table_count(), 2U);
}

// Odds of any fineness are read, as earlier encoders wrote them. Method: an extent put together by hand.
TEST(CoderTables, AreMadeForOddsThatNobodyRounded) {
    const Matrix matrix = random_matrix(40, 100, 0.8, 1);
    ExtentHeader header;
    header.rows = header.rows_per_tile = 40;
    header.columns = 100;
    header.classes = {{0}};
    header.tunstall = {{{52431, 6551}, WordLimit::w31}};
    header.tiles = {{Coder::tun12, 0, 40, 0, 0}};
    const Tun12Encoder encoder(100, header.classes, header.tunstall);
    const ExtentBuffer extent = build_extent(header, {encoder.encode(matrix.view(), InstructionSet::portable)});
    for (const InstructionSet set : available_sets()) {
        EXPECT_EQ(decoded(CodedMatrix(extent.bytes()), set), matrix.values);
    }
}

}  // namespace
}  // namespace torch_offload
