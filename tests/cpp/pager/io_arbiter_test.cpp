#include "pager/io_arbiter.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "base/units.h"

namespace torch_offload::test {
namespace {

using std::chrono::nanoseconds;

constexpr IoLoad kSaturated{.waiting_reads = 100, .waiting_writes = 100, .under_way = 100};
constexpr std::size_t kPieceBytes = 64 * kMiB;

/// Lets the arbiter see a disk whose rate depends on the shape, for so many trials.
void run(IoArbiter& arbiter, std::size_t trials, const std::function<double(const IoShape&)>& bytes_per_second) {
    for (const std::size_t end = arbiter.trials() + trials; arbiter.trials() < end;) {
        const double seconds = static_cast<double>(kPieceBytes) / bytes_per_second(arbiter.shape());
        arbiter.note(kPieceBytes, nanoseconds(static_cast<std::int64_t>(seconds * 1e9)), kSaturated);
    }
}

double deep_is_fast(const IoShape& shape) { return shape.depth == 16 ? 3e9 : 2e9; }
double shallow_is_fast(const IoShape& shape) { return shape.depth == 4 ? 3e9 : 2e9; }

// Directions take turns in batches while both wait, and neither waits for one that is not there. Method: a long load.
TEST(IoArbiter, AlternatesInBatches) {
    IoArbiter arbiter(16);
    std::string order;
    for (int i = 0; i < 12; ++i) {
        order += arbiter.next({.waiting_reads = 9, .waiting_writes = 9}) == IoDirection::read ? 'r' : 'w';
    }
    EXPECT_EQ(order, "rrrrwwwwrrrr");
    EXPECT_EQ(arbiter.next({.waiting_writes = 1}), IoDirection::write);
    EXPECT_EQ(arbiter.next({.waiting_reads = 1}), IoDirection::read);
}

// Nothing is submitted beyond the depth, nor when nothing waits; the engine's capacity bounds every shape.
TEST(IoArbiter, KeepsTheDepth) {
    IoArbiter arbiter(2);
    EXPECT_FALSE(arbiter.next({}).has_value());
    EXPECT_TRUE(arbiter.next({.waiting_reads = 9, .under_way = 1}).has_value());
    EXPECT_FALSE(arbiter.next({.waiting_reads = 9, .under_way = 2}).has_value());
    run(arbiter, 20, [](const IoShape& shape) {
        EXPECT_LE(shape.depth, 2u);
        return 1e9;
    });
}

// The fastest shape is used, and found again after the disk has changed. Method: a simulated disk that prefers depth,
// then one that does not.
TEST(IoArbiter, FindsTheFastestAgain) {
    IoArbiter arbiter(16);
    const auto share_of = [&](std::size_t depth, const std::function<double(const IoShape&)>& disk) {
        int hits = 0;
        for (int i = 0; i < 80; ++i) {
            run(arbiter, 1, disk);
            hits += arbiter.shape().depth == depth;
        }
        return hits;
    };
    run(arbiter, 8, deep_is_fast);
    EXPECT_GE(share_of(16, deep_is_fast), 68);
    run(arbiter, 80, shallow_is_fast);
    EXPECT_GE(share_of(4, shallow_is_fast), 68);
}

// A program that sets the pace says nothing about the disk. Method: time passes at half the depth.
TEST(IoArbiter, IgnoresUnsaturatedTime) {
    IoArbiter arbiter(16);
    arbiter.note(kGiB, std::chrono::seconds(1), {.waiting_reads = 5, .under_way = 2});
    EXPECT_EQ(arbiter.trials(), 0u);
}

}  // namespace
}  // namespace torch_offload::test
