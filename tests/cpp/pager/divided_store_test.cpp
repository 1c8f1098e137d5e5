#include "pager/divided_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/log_capture.h"
#include "support/seeds.h"
#include "support/stored_pager.h"

namespace torch_offload::test {
namespace {

using Servers = std::vector<std::unique_ptr<PageServer>>;

Servers servers_with(std::size_t count, const PageServerOptions& options) {
    Servers servers;
    for (std::size_t i = 0; i < count; ++i) servers.push_back(std::make_unique<PageServer>(options));
    return servers;
}

std::unique_ptr<DividedStore> store_over(std::span<const NetAddress> addresses, const std::string& kernels = {}) {
    return std::make_unique<DividedStore>(addresses, kPageBytes, 8, options_with(1).transfer_limits, kernels);
}

std::unique_ptr<DividedStore> store_over(const Servers& servers, const std::string& kernels = {}) {
    std::vector<NetAddress> addresses;
    for (const auto& server : servers) addresses.push_back(server->address());
    return store_over(addresses, kernels);
}

std::string name_of(const PageServer& server) { return concat("store ", server.address().text()); }

// Pages of large segments go round all stores, and segments of one page are spread as evenly; all come back as they
// went, and what the client counts is the sum. Method: 96 segments of one page, then 12 of eight, of which none stays
// here; what each of three stores received.
TEST(DividedStore, PagesAreDividedEvenly) {
    for (const std::size_t pages_of_each : {std::size_t{1}, std::size_t{8}}) {
        SCOPED_TRACE(testing::Message() << "segments of " << pages_of_each);
        const Servers servers = servers_with(3, server_options(24));
        StoredPager client(store_over(servers), 16);
        client.fill_segments(static_cast<std::uint32_t>(96 / pages_of_each), pages_of_each, 0);
        for (const auto& segment : client.segments) ASSERT_EQ(client.pager.evict(segment), 0u);
        std::string names;
        for (const auto& server : servers) {
            EXPECT_NEAR(static_cast<double>(server->statistics().received_bytes), 32.0 * kPageBytes, 2.0 * kPageBytes);
            names += concat(names.empty() ? "" : ", ", name_of(*server));
        }
        const StoreStatistics there = client.pager.statistics().store;
        EXPECT_EQ(there.stored_bytes, 96 * kPageBytes);
        EXPECT_EQ(there.engine, names);
        EXPECT_EQ(client.first_wrong(0), client.segments.size());
        EXPECT_GE(total(client.pager.statistics().read_bytes), 96 * kPageBytes);
        for (const auto& server : servers) EXPECT_GE(server->statistics().sent_bytes, 28 * kPageBytes);
        client.segments.clear();
        for (const auto& server : servers) {
            EXPECT_TRUE(comes_true([&] { return server->statistics().segments == 0; }));
        }
    }
}

// Training is right whatever the capacities, with updates at each store on its own pages, and states that never move.
// Method: seeds; what is computed in plain memory beside it.
TEST(DividedUpdates, RandomCapacitiesChangeNothing) {
    for (const std::uint64_t seed : seeds({.usual = 10, .full = 500})) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const std::size_t pages_here = 8 + random() % 8;
        const std::size_t pages_there = 16 + random() % 12;
        const Servers servers = servers_with(2 + random() % 2, updating_options(pages_there));
        const auto pager = updating_pager(store_over(servers, kKernels), pages_here);
        ASSERT_TRUE(pager->options().updates_below);
        SmallTraining training(*pager, seed, 6 + random() % 4, 3);
        for (int step = 0; step < 3; ++step) ASSERT_EQ(training.step(), 0u) << "step " << step;
        const PagerStatistics moved = pager->statistics();
        EXPECT_EQ(moved.read_bytes[static_cast<std::size_t>(SegmentKind::state)], 0u);
        EXPECT_EQ(moved.written_bytes[static_cast<std::size_t>(SegmentKind::state)], 0u);
        ASSERT_EQ(training.differences(), 0u);
        ASSERT_LE(pager->statistics().memory.peak_bytes, pages_here * kPageBytes);
        for (const auto& server : servers) {
            ASSERT_GT(server->statistics().updates, 0u);
            ASSERT_LE(server->statistics().pager.memory.peak_bytes, pages_there * kPageBytes);
        }
    }
}

// Segments that were made for one parameter lie together, page by page, and their updates run there; where nobody knew
// that they would be updated together, the client runs them. Method: latches on a weight and a state, with its anchor
// and without.
TEST(DividedUpdates, PagesThatLieApartAreUpdatedHere) {
    const Servers servers = servers_with(2, updating_options(64));
    const auto pager = updating_pager(store_over(servers, kKernels), 32);
    const auto segment_of = [&](TraceId role, TraceId anchor) {
        auto segment = pager->create_segment(4 * kPageBytes, 4, SegmentKind::state);
        segment->assume({SegmentKind::state, "a segment", role, anchor});
        const PinGuard guard = pin(*pager, segment, Access::overwrite);
        fill(*segment, role);
        return segment;
    };
    const auto weight = segment_of(0, kNoTrace);
    const auto state = segment_of(1, 0);
    const auto stranger = segment_of(1, kNoTrace);  // the other store has its first page
    pager->set_anchor(*stranger, 0);                // too late
    for (const auto& segment : {weight, state, stranger}) ASSERT_EQ(pager->evict(segment), 0u);
    for (std::size_t index = 0; index < 4; ++index) {
        EXPECT_TRUE(pager->latch_for_update(std::vector{weight, state}, index, true).is_remote());
        UpdateLatch latch = pager->latch_for_update(std::vector{weight, stranger}, index, true);
        ASSERT_TRUE(latch);
        ASSERT_FALSE(latch.is_remote());
        EXPECT_EQ(words_of(latch.bytes(1)).front(), word_of(1, index * kPageElements));
    }
}

// Of two stores one updates its pages, and those of the other, whose kernels may give other bits, are updated here;
// they are not sent there for it. Method: memory for everything, so that only updates move pages.
TEST(DividedUpdates, WhereAStoreRunsNoneTheClientDoes) {
    Servers servers = servers_with(1, updating_options(64));
    PageServerOptions others = updating_options(64);
    others.kernels = "others";
    servers.push_back(std::make_unique<PageServer>(others));
    const auto pager = updating_pager(store_over(servers, kKernels), 256);
    ASSERT_TRUE(pager->options().updates_below);
    SmallTraining training(*pager, 3, 8, 3);
    for (int step = 0; step < 4; ++step) {
        ASSERT_EQ(training.step(), 0u);
        const PageServerStatistics other = servers[1]->statistics();
        EXPECT_EQ(other.received_bytes, 0u);
    }
    EXPECT_EQ(training.differences(), 0u);
    EXPECT_GT(servers[0]->statistics().updates, 0u);
    EXPECT_EQ(servers[1]->statistics().updates, 0u);
    EXPECT_FALSE(store_over(std::vector{servers[1]->address()}, kKernels)->runs_work());
}

// A store that ends takes its pages with it, by name; those of the others stay usable. Method: two stores, one of which
// is destroyed under a client; each page by itself.
TEST(DividedStore, StoreThatIsGoneIsNamedAndTheOtherStays) {
    Servers servers = servers_with(2, server_options(64));
    StoredPager client(store_over(servers), 16);
    client.fill_segments(4, 4, 0);
    for (const auto& segment : client.segments) ASSERT_EQ(client.pager.evict(segment), 0u);
    const std::string gone = name_of(*servers.front());
    servers.front().reset();
    std::size_t lost = 0;
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
        for (std::size_t index = 0; index < 4; ++index) {
            const auto& segment = client.segments[seed];
            try {
                const PinGuard guard = client.pager.pin_pages(segment, index, 1, Access::read);
                EXPECT_EQ(words_of(segment->page_range(index)).front(), word_of(seed, index * kPageElements));
            } catch (const TierIoError& error) {
                EXPECT_NE(std::string(error.what()).find(gone), std::string::npos) << error.what();
                EXPECT_NE(std::string(error.what()).find(segment->label), std::string::npos) << error.what();
                lost += 1;
            }
        }
    }
    EXPECT_EQ(lost, 8u);
}

// What is wrong with one of several is said before the first page goes. Method: a store under two names, one that is
// not there, one whose memory is small.
TEST(DividedStore, OneThatCannotBeIsAnError) {
    Servers servers = servers_with(2, server_options(16));
    const NetAddress first = servers[0]->address();
    const auto error_of = [](const std::vector<NetAddress>& addresses) -> std::string {
        try {
            store_over(addresses);
        } catch (const OffloadError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_EQ(error_of({first, servers[1]->address()}), "");
    EXPECT_EQ(
        error_of({first, servers[1]->address(), {"localhost", first.port}}),
        concat(name_of(*servers[0]), " and store localhost:", first.port, " are the same process; name each once"));
    const NetAddress absent = servers[1]->address();
    servers.pop_back();
    EXPECT_NE(error_of({first, absent}).find(concat("store ", absent.text(), " does not answer")), std::string::npos);
    servers.push_back(std::make_unique<PageServer>(server_options(31)));
    {
        const LogCapture log(LogLevel::warning);
        store_over(servers);
        EXPECT_EQ(log.lines(), "");
    }
    servers.push_back(std::make_unique<PageServer>(server_options(32)));
    const LogCapture log(LogLevel::warning);
    store_over(servers);
    EXPECT_NE(log.lines().find(concat(name_of(*servers[0]), " has ", 16 * kPageBytes, " bytes")), std::string::npos);
    EXPECT_NE(log.lines().find(concat(name_of(*servers[2]), " ", 32 * kPageBytes)), std::string::npos);
}

// Each store learns when passes begin and steps end, and keeps of its pages what is needed next. Method: passes over
// 192 pages at two stores of 64, each of which keeps 8 free; the least recently used page going first would keep
// nothing.
TEST(DividedStore, EachKeepsWhatIsNeededNext) {
    for (const Said said : {Said::begins, Said::ends}) {
        SCOPED_TRACE(testing::Message() << "as said " << static_cast<int>(said));
        const Servers servers = servers_with(2, server_options(64));
        StoredPager client(store_over(servers), 8);
        for (std::uint32_t i = 0; i < 192; ++i) client.segments.push_back(segment_with_role(client.pager, 1, i));
        client.run_passes(3, said);
        std::vector<std::uint64_t> before;
        for (const auto& server : servers) before.push_back(total(server->statistics().pager.read_bytes));
        const std::size_t half_bytes = client.run_passes(4, said) / 2;
        for (std::size_t i = 0; i < servers.size(); ++i) {
            const std::uint64_t read_bytes = total(servers[i]->statistics().pager.read_bytes) - before[i];
            EXPECT_LT(static_cast<double>(read_bytes), 0.7 * static_cast<double>(half_bytes));
        }
        EXPECT_EQ(client.first_wrong(0), 192u);
    }
}

}  // namespace
}  // namespace torch_offload::test
