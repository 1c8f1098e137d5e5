#include "pager/remote_store.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "pager/page_server.h"
#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

PageServerOptions server_options(std::size_t budget_pages) {
    return {{"127.0.0.1", 0}, options_with(budget_pages), {}};
}

/// A pager whose pages go to a store.
struct StoredPager {
    StoredPager(const NetAddress& address, std::size_t budget_pages)
        : pager(options_with(budget_pages),
                std::make_unique<RemoteStore>(address, kPageBytes, 8, options_with(1).transfer_limits)) {}

    void fill_segments(std::uint32_t count, std::size_t pages, std::uint32_t seed) {
        for (std::uint32_t i = 0; i < count; ++i) segments.push_back(filled_segment(pager, pages, seed + i));
    }
    /// Of the first that differs, or the number of segments.
    std::size_t first_wrong(std::uint32_t seed) {
        for (std::uint32_t i = 0; i < segments.size(); ++i) {
            const PinGuard guard = pin(pager, segments[i], Access::read);
            if (!holds(*segments[i], seed + i)) return i;
        }
        return segments.size();
    }

    Pager pager;
    std::vector<std::shared_ptr<Segment>> segments;
};

// What memory has no room for is sent to the store and comes back the same, page for page. Method: 60 pages, the last
// of each segment a short one, over a client of 8 and a store of 24; what both count.
TEST(RemoteStore, PagesComeBackAsTheyWent) {
    PageServer server(server_options(24));
    StoredPager client(server.address(), 8);
    for (std::uint32_t i = 0; i < 15; ++i) {
        client.segments.push_back(client.pager.create_segment(3 * kPageBytes + 4096 + 4 * i, 4, SegmentKind::state));
        const PinGuard guard = pin(client.pager, client.segments.back(), Access::overwrite);
        fill(*client.segments.back(), i);
    }
    for (int round = 0; round < 2; ++round) ASSERT_EQ(client.first_wrong(0), 15u);
    const PagerStatistics here = client.pager.statistics();
    const PageServerStatistics there = server.statistics();
    EXPECT_GE(total(here.read_bytes), 80 * kPageBytes);
    EXPECT_GT(there.received_bytes, 40 * kPageBytes);
    EXPECT_GT(there.sent_bytes, 80 * kPageBytes);
    EXPECT_GT(total(there.pager.written_bytes), 0u);  // to its own SSD
    EXPECT_GT(total(there.pager.read_bytes), 0u);
    EXPECT_LE(there.pager.memory.peak_bytes, 24 * kPageBytes);
    EXPECT_EQ(there.damaged_bytes, 0u);
}

// What a client forgets and what a client that goes leaves is nowhere any more. Method: segments end, then the client.
TEST(RemoteStore, NothingIsLeftAtTheStore) {
    PageServer server(server_options(64));
    StoredPager other(server.address(), 8);
    other.fill_segments(4, 4, 100);
    {
        StoredPager client(server.address(), 8);
        client.fill_segments(8, 4, 0);
        ASSERT_GE(server.statistics().segments, 8u);
        client.segments.resize(6);
        const auto is_forgotten = [&] { return server.statistics().segments <= 6u + 4u; };
        EXPECT_TRUE(comes_true(is_forgotten));
        EXPECT_EQ(client.first_wrong(0), 6u);
        EXPECT_EQ(server.statistics().clients, 2u);
    }
    const auto is_gone = [&] { return server.statistics().clients == 1 && server.statistics().segments <= 4; };
    EXPECT_TRUE(comes_true(is_gone));
    EXPECT_EQ(other.first_wrong(100), 4u);
}

// Memory at the store is the same for one client and for 64: what is lent is shared by all. Method: as many pages from
// 64 clients at once as from one before.
TEST(RemoteStore, MemoryOfTheStoreDoesNotGrowWithClients) {
    const auto peak_with = [](std::size_t client_count) {
        PageServer server(server_options(128));
        std::vector<std::unique_ptr<StoredPager>> clients;
        for (std::size_t i = 0; i < client_count; ++i) {
            clients.push_back(std::make_unique<StoredPager>(server.address(), 4));
        }
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < client_count; ++i) {
            threads.emplace_back([&, i] {
                const auto seed = static_cast<std::uint32_t>(1000 * i);
                clients[i]->fill_segments(static_cast<std::uint32_t>(256 / client_count), 2, seed);
                EXPECT_EQ(clients[i]->first_wrong(seed), 256 / client_count);
            });
        }
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(server.statistics().clients, client_count);
        EXPECT_LE(server.statistics().peak_lent_bytes, 32 * kPageBytes);
        return server.statistics().pager.memory.peak_bytes;
    };
    const std::size_t with_one = peak_with(1);
    const std::size_t with_many = peak_with(64);
    EXPECT_GT(with_one, 100 * kPageBytes);
    EXPECT_LE(with_many > with_one ? with_many - with_one : with_one - with_many, 128 * kPageBytes / 100);
}

// A store that ends takes its pages with it: the next access to one of them raises, at once and by name. What is in
// memory stays usable. Method: a server that is destroyed under a client.
TEST(RemoteStore, StoreThatIsGoneIsAnError) {
    auto server = std::make_unique<PageServer>(server_options(64));
    const std::string name = server->address().text();
    StoredPager client(server->address(), 8);
    client.fill_segments(2, 3, 0);
    ASSERT_EQ(client.pager.evict(client.segments[0]), 0u);
    server.reset();
    try {
        const PinGuard guard = pin(client.pager, client.segments[0], Access::read);
        FAIL() << "the page cannot be there";
    } catch (const TierIoError& error) {
        EXPECT_NE(std::string(error.what()).find("store " + name), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("segment 0"), std::string::npos) << error.what();
    }
    const PinGuard guard = pin(client.pager, client.segments[1], Access::read);
    EXPECT_TRUE(holds(*client.segments[1], 1));
    EXPECT_THROW(StoredPager(NetAddress::parse(name), 8), TierIoError);
}

// Who would send pages that cannot be kept is refused with a sentence that says what helps. Method: clients whose pages
// are as large as what the store lends, and larger; a store that could not serve any.
TEST(RemoteStore, StoreRefusesWithASentence) {
    PageServer server(server_options(16));
    const auto refusal_of = [&](std::size_t page_bytes) -> std::string {
        try {
            RemoteStore store(server.address(), page_bytes, 8, {});
        } catch (const TierIoError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_EQ(refusal_of(4 * kPageBytes), "");
    EXPECT_NE(refusal_of(5 * kPageBytes).find("--ram " + std::to_string(20 * kPageBytes)), std::string::npos);
    EXPECT_THROW(PageServer(server_options(3)), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload::test
