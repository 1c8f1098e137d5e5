#include "support/sim_engine.h"

#include "conformance/io_engine_contract.h"
#include "storage/checksum.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

struct SimEngineFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) { return std::make_unique<SimEngine>(capacity, 1); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, IoEngineContract, SimEngineFactory);

constexpr std::uint64_t kStore = 5;
constexpr int kFile = 3;
constexpr std::size_t kMaxPageBytes = 8 * kSectorBytes;

/// What one seeded case saw.
struct Outcome {
    int exact_count = 0;     // error 0, checksum right, bytes right
    int error_count = 0;     // `error` set
    int mismatch_count = 0;  // error 0, the checksum tells that the bytes are wrong
    int silent_count = 0;    // error 0, the checksum misjudges the bytes: must never be
    int wrong_count = 0;     // error 0, bytes wrong, before the checksum is asked

    Outcome& operator+=(const Outcome& other) {
        exact_count += other.exact_count;
        error_count += other.error_count;
        mismatch_count += other.mismatch_count;
        silent_count += other.silent_count;
        wrong_count += other.wrong_count;
        return *this;
    }
};

/// A page as a pager knows it: what was last written in full, and under which version.
struct Page {
    AlignedBuffer written{kMaxPageBytes};
    AlignedBuffer memory{kMaxPageBytes};
    IoRequest request;
    std::uint64_t version = 0;
    std::uint64_t checksum = 0;
    bool is_stored = false;
};

/// Submits one request per page and reaps them all, as room allows.
void transfer_all(IoEngine& engine, std::vector<Page>& pages) {
    std::vector<IoRequest*> waiting;
    for (Page& page : pages) waiting.push_back(&page.request);
    std::size_t taken = 0, back = 0;
    while (back < waiting.size()) {
        taken += engine.submit(std::span(waiting).subspan(taken));
        std::vector<IoRequest*> finished(4);
        back += engine.reap(finished, kLong);
    }
}

void write_pages(IoEngine& engine, std::vector<Page>& pages, std::uint64_t content_seed) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
        Page& page = pages[i];
        page.written.fill(content_seed + i);
        page.checksum = page_checksum(page.written.bytes(), {kStore, i, ++page.version});
        page.request = {.direction = IoDirection::write,
                        .file_descriptor = kFile,
                        .offset_bytes = i * kMaxPageBytes,
                        .buffer = page.written.bytes()};
    }
    transfer_all(engine, pages);
    for (Page& page : pages) page.is_stored = page.request.error == 0;
}

Outcome read_pages(IoEngine& engine, std::vector<Page>& pages) {
    Outcome outcome;
    for (std::size_t i = 0; i < pages.size(); ++i) {
        pages[i].request = {.direction = IoDirection::read,
                            .file_descriptor = kFile,
                            .offset_bytes = i * kMaxPageBytes,
                            .buffer = pages[i].memory.bytes()};
    }
    transfer_all(engine, pages);
    for (std::size_t i = 0; i < pages.size(); ++i) {
        const Page& page = pages[i];
        if (!page.is_stored || page.request.error != 0) {
            ++outcome.error_count;
            continue;
        }
        const bool is_right = page_checksum(page.memory.bytes(), {kStore, i, page.version}) == page.checksum;
        const bool is_exact = page.memory == page.written;
        outcome.wrong_count += !is_exact;
        outcome.exact_count += is_right && is_exact;
        outcome.mismatch_count += !is_right;
        outcome.silent_count += is_right != is_exact;
    }
    return outcome;
}

/// Three rounds of writing and reading up to 12 pages through a disk that fails as `seed` and `chances` say.
Outcome run_case(std::uint64_t seed, const SimChances& chances, SimChances& injected) {
    std::mt19937_64 random(seed);
    SimEngine engine(1 + random() % 8, seed, chances);
    std::vector<Page> pages(1 + random() % 12);
    Outcome outcome;
    for (int round = 0; round < 3; ++round) {
        write_pages(engine, pages, random());
        outcome += read_pages(engine, pages);
    }
    for (std::size_t i = 0; i < kSimFaultCount; ++i) {
        injected[i] += static_cast<std::uint32_t>(engine.injected_count(static_cast<SimFault>(i)));
    }
    return outcome;
}

/// A case's own chances: each honest fault between 0 and `most` in a thousand, the silent ones `silent`.
SimChances draw_chances(std::uint64_t seed, std::uint32_t most, std::uint32_t silent) {
    std::mt19937_64 random(seed);
    SimChances chances{};
    for (std::uint32_t& chance : chances) chance = static_cast<std::uint32_t>(random() % (most + 1));
    chances[static_cast<std::size_t>(SimFault::silent_torn_write)] = silent;
    chances[static_cast<std::size_t>(SimFault::silent_bit_flip)] = silent;
    return chances;
}

constexpr SeedCounts kCases{.usual = 2000, .full = 20'000};

// A disk that admits its faults never gives wrong bytes: exact data or an error, also without checksums.
// Method: seeds, every honest fault.
TEST(SimulatedFaults, HonestFaultsNeverGiveWrongBytes) {
    Outcome total;
    SimChances injected{};
    for (const std::uint64_t seed : seeds(kCases)) {
        const Outcome outcome = run_case(seed, draw_chances(seed, 150, 0), injected);
        ASSERT_EQ(outcome.wrong_count, 0) << "seed " << seed;
        total += outcome;
    }
    EXPECT_GT(total.exact_count, 1000);
    EXPECT_GT(total.error_count, 1000);
    EXPECT_EQ(total.silent_count, 0);
    constexpr auto kHonestCount = static_cast<std::size_t>(SimFault::silent_torn_write);
    for (std::size_t i = 0; i < kHonestCount; ++i) EXPECT_GT(injected[i], 1000u) << i;
}

// A disk that lies is found out by the checksum. Method: seeds with silently torn writes and flipped bits.
TEST(SimulatedFaults, SilentFaultsAreCaughtByTheChecksum) {
    Outcome total;
    SimChances injected{};
    for (const std::uint64_t seed : seeds(kCases)) {
        const Outcome outcome = run_case(seed, draw_chances(seed, 20, 100), injected);
        ASSERT_EQ(outcome.silent_count, 0) << "seed " << seed;
        ASSERT_EQ(outcome.wrong_count, outcome.mismatch_count) << "seed " << seed;
        total += outcome;
    }
    EXPECT_GT(total.mismatch_count, 1000);
    EXPECT_GT(total.exact_count, 1000);
    EXPECT_GT(injected[static_cast<std::size_t>(SimFault::silent_torn_write)], 1000u);
    EXPECT_GT(injected[static_cast<std::size_t>(SimFault::silent_bit_flip)], 1000u);
}

// The same seed gives the same faults and outcomes. Method: run 50 cases twice.
TEST(SimulatedFaults, SameSeedSameFaults) {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        SimChances first{}, second{};
        const Outcome a = run_case(seed, draw_chances(seed, 150, 50), first);
        const Outcome b = run_case(seed, draw_chances(seed, 150, 50), second);
        EXPECT_EQ(a.exact_count, b.exact_count);
        EXPECT_EQ(a.error_count, b.error_count);
        EXPECT_EQ(first, second);
    }
}

/// A write of four sectors, and a read of them, on a disk that follows a script.
class ScriptedFaults : public ::testing::Test {
protected:
    void SetUp() override { memory.fill(1); }

    int error_of(IoDirection direction, std::initializer_list<SimFault> script) {
        for (const SimFault fault : script) engine.script(fault);
        request.direction = direction;
        transfer(engine, request);
        return request.error;
    }

    SimEngine engine{4, 1};
    AlignedBuffer memory{4 * kSectorBytes};
    IoRequest request{.file_descriptor = kFile, .buffer = memory.bytes()};
};

// Faults that pass are ridden out. Method: short, interrupted, refused for now, late and one EIO in one transfer.
TEST_F(ScriptedFaults, PassingFaultsAreRiddenOut) {
    EXPECT_EQ(error_of(IoDirection::write, {SimFault::short_transfer, SimFault::interrupted, SimFault::again,
                                            SimFault::late, SimFault::io_error_once}),
              0);
    EXPECT_EQ(request.rounds, 3u);
    EXPECT_EQ(request.retries, 1u);
    AlignedBuffer expected(4 * kSectorBytes);
    expected.fill(1);
    memory.fill(2);
    EXPECT_EQ(error_of(IoDirection::read, {SimFault::short_transfer, SimFault::late, SimFault::short_transfer}), 0);
    EXPECT_TRUE(memory == expected);
}

// Faults that stay are errors, named by their errno. Method: a bad place, a full disk, a write torn twice.
TEST_F(ScriptedFaults, LastingFaultsAreErrors) {
    EXPECT_EQ(error_of(IoDirection::write, {SimFault::no_space}), ENOSPC);
    EXPECT_EQ(error_of(IoDirection::write, {SimFault::torn_write, SimFault::torn_write}), EIO);
    EXPECT_EQ(error_of(IoDirection::write, {SimFault::torn_write}), 0);
    EXPECT_EQ(error_of(IoDirection::write, {SimFault::io_error_forever}), EIO);
    EXPECT_EQ(error_of(IoDirection::read, {}), EIO);
}

// A write that the disk dropped without a word is found by the version in the checksum, although the bytes that come
// back were once right. Method: write version 1, tear version 2 silently, read.
TEST_F(ScriptedFaults, StaleBytesAreAMismatch) {
    ASSERT_EQ(error_of(IoDirection::write, {}), 0);
    const std::uint64_t old_checksum = page_checksum(memory.bytes(), {kStore, 0, 1});
    memory.fill(2);
    const std::uint64_t new_checksum = page_checksum(memory.bytes(), {kStore, 0, 2});
    ASSERT_EQ(error_of(IoDirection::write, {SimFault::silent_torn_write}), 0);
    ASSERT_EQ(error_of(IoDirection::read, {}), 0);
    EXPECT_NE(page_checksum(memory.bytes(), {kStore, 0, 2}), new_checksum);
    EXPECT_NE(page_checksum(memory.bytes(), {kStore, 0, 2}), old_checksum);
}

}  // namespace
}  // namespace torch_offload::test
