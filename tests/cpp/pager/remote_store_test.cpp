#include "pager/remote_store.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/seeds.h"
#include "support/stored_pager.h"

namespace torch_offload::test {
namespace {

/// A client that says what a test wants it to say.
struct RawClient {
    explicit RawClient(const NetAddress& address) : channel(connect_to(address, std::chrono::seconds(5)), "store") {}

    void say(const MessageHeader& header, std::span<const std::byte> body = {}) {
        for (channel.send(header, body); channel.is_sending(); channel.wait(-1, 10)) channel.flush();
    }
    /// The kind of the next message; the body goes to `text`. Throws: TierIoError if the store hangs up, LogicError if
    /// it says nothing for ten seconds.
    MessageKind hear() {
        for (int turn = 0; turn < 100; ++turn) {
            const Channel::Arrival arrival = channel.receive();
            if (arrival == Channel::Arrival::message) return channel.header().kind;
            if (arrival == Channel::Arrival::header) {
                text.resize(channel.header().body_bytes);
                channel.receive_into(std::as_writable_bytes(std::span(text)));
            } else {
                channel.wait(-1, 100);
            }
        }
        throw LogicError("the store says nothing");
    }
    void greet() {
        say({.kind = MessageKind::hello, .page_bytes = kPageBytes});
        ASSERT_EQ(hear(), MessageKind::welcome);
    }
    static MessageHeader write_of(std::uint32_t number) {
        return {.kind = MessageKind::write,
                .request = number,
                .segment = 7,
                .segment_bytes = 100 * kPageBytes,
                .page_bytes = kPageBytes,
                .page = number};
    }

    Channel channel;
    std::string text;
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

// What a client forgets is nowhere any more, and so is what a client had that goes without a word; others keep theirs.
// Method: segments that end; a connection that does.
TEST(RemoteStore, NothingIsLeftAtTheStore) {
    PageServer server(server_options(64));
    StoredPager client(server.address(), 8);
    client.fill_segments(8, 4, 0);
    const std::uint64_t all = server.statistics().segments;
    EXPECT_GE(all, 6u);
    client.segments.erase(client.segments.begin(), client.segments.begin() + 3);
    EXPECT_TRUE(comes_true([&] { return server.statistics().segments == all - 3; }));
    {
        RawClient other(server.address());
        other.greet();
        other.say(RawClient::write_of(0));
        ASSERT_EQ(other.hear(), MessageKind::granted);
        EXPECT_EQ(server.statistics().segments, all - 2);
        EXPECT_EQ(server.statistics().clients, 2u);
    }
    EXPECT_TRUE(comes_true([&] { return server.statistics().clients == 1; }));
    EXPECT_EQ(server.statistics().segments, all - 3);
    EXPECT_EQ(client.first_wrong(3), 5u);
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

/// Bytes that a store reads from its SSD for each pass over the client's segments, as a part of them.
double read_of_each(const PageServer& server, StoredPager& client, int passes, Said said) {
    const std::uint64_t before = total(server.statistics().pager.read_bytes);
    const std::size_t size_bytes = client.run_passes(passes, said);
    return static_cast<double>(total(server.statistics().pager.read_bytes) - before) / static_cast<double>(size_bytes);
}

// What a store keeps is what its client needs next, so as much of each pass is there as memory holds. Method: passes
// over 96 pages at a store of 64, which keeps 8 free, and as many clients that say nothing of passes, whose pages go in
// the order of their last use: each before it is needed. Of many passes, as single ones vary where others run beside.
TEST(RemoteStore, KeepsWhatIsNeededNext) {
    PageServer server(server_options(64));
    StoredPager silent(server.address(), 8);
    for (std::uint32_t i = 0; i < 96; ++i) silent.segments.push_back(segment_with_role(silent.pager, 1, i));
    EXPECT_GT(read_of_each(server, silent, 16, Said::nothing), 0.7);
    silent.segments.clear();
    StoredPager client(server.address(), 8);
    for (std::uint32_t i = 0; i < 96; ++i) client.segments.push_back(segment_with_role(client.pager, 1, i));
    read_of_each(server, client, 3, Said::ends);
    EXPECT_LT(read_of_each(server, client, 16, Said::ends), 0.6);  // at best 0.42: 96 pages without 56
    EXPECT_EQ(client.first_wrong(0), 96u);
}

// A client that stands still has no claim on memory for long. Method: one whose pages fill the store, and then does
// nothing; another, whose pages fit in its place.
TEST(RemoteStore, WhoDoesNotComeBackGivesWay) {
    PageServer server(server_options(64));
    StoredPager idle(server.address(), 8);
    for (std::uint32_t i = 0; i < 60; ++i) idle.segments.push_back(segment_with_role(idle.pager, 1, i));
    read_of_each(server, idle, 4, Said::ends);
    StoredPager client(server.address(), 8);
    for (std::uint32_t i = 0; i < 48; ++i) client.segments.push_back(segment_with_role(client.pager, 1, i));
    EXPECT_TRUE(comes_true([&] { return read_of_each(server, client, 1, Said::ends) == 0.0; }));
    EXPECT_EQ(client.first_wrong(0), 48u);
    EXPECT_EQ(idle.first_wrong(0), 60u);
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

// A client that has all memory for pages on their way, and neither sends nor takes anything, does not stop the others:
// it is hung up on when they wait for it. Method: one that is granted as much as there is and says no more.
TEST(RemoteStore, WhoStandsStillWithMemoryThatOthersWaitForIsDropped) {
    PageServerOptions options = server_options(16);
    options.pager.transfer_limits.timeout = std::chrono::milliseconds(300);
    PageServer server(options);
    RawClient still(server.address());
    still.greet();
    for (std::uint32_t number = 0; number < 4; ++number) {
        still.say(RawClient::write_of(number));
        ASSERT_EQ(still.hear(), MessageKind::granted);
    }
    EXPECT_EQ(server.statistics().peak_lent_bytes, 4 * kPageBytes);
    StoredPager other(server.address(), 8);
    other.fill_segments(5, 4, 0);
    EXPECT_EQ(other.first_wrong(0), 5u);
    EXPECT_THROW(still.hear(), TierIoError);
    EXPECT_EQ(server.statistics().clients, 1u);
}

// What cannot be meant ends the connection, what cannot be done is answered, and neither disturbs anybody. Method:
// bytes that were not granted, an answer as only a store gives, too many questions; pages that there are not.
TEST(RemoteStore, WhoBreaksTheRulesIsHungUpOn) {
    PageServer server(server_options(16));
    StoredPager other(server.address(), 8);
    other.fill_segments(5, 4, 0);
    const std::vector<std::byte> page(kPageBytes);
    const auto hangs_up = [&](const std::function<void(RawClient&)>& misbehave) {
        RawClient client(server.address());
        client.greet();
        try {
            misbehave(client);
            while (true) client.hear();
        } catch (const TierIoError&) {
            return true;
        }
    };
    EXPECT_TRUE(hangs_up([&](RawClient& client) { client.say({.kind = MessageKind::bytes, .request = 3}, page); }));
    EXPECT_TRUE(hangs_up([](RawClient& client) { client.say({.kind = MessageKind::bytes, .request = 3}); }));
    EXPECT_TRUE(hangs_up([](RawClient& client) { client.say({.kind = MessageKind::stored}); }));
    EXPECT_TRUE(hangs_up([](RawClient& client) {
        for (std::uint32_t number = 0; number <= kMaxRequests; ++number) client.say(RawClient::write_of(number));
    }));
    RawClient client(server.address());
    client.greet();
    client.say({.kind = MessageKind::read, .segment = 9});
    EXPECT_EQ(client.hear(), MessageKind::failed);
    EXPECT_EQ(client.text, "there is no segment 9");
    client.say(RawClient::write_of(100));
    EXPECT_EQ(client.hear(), MessageKind::failed);
    EXPECT_EQ(client.text, "segment 7 has 100 pages, asked for is page 100");
    EXPECT_EQ(other.first_wrong(0), 5u);
}

// --- Updates ------------------------------------------------------------------------------------------------------

std::unique_ptr<Pager> updating_pager(const NetAddress& address, std::size_t budget_pages) {
    const TransferLimits limits = options_with(1).transfer_limits;
    return test::updating_pager(std::make_unique<RemoteStore>(address, kPageBytes, 8, limits, kKernels), budget_pages);
}

// Whatever the capacities here and there, training is right with updates at the store, and no memory is exceeded.
// Method: seeds; what is computed in plain memory beside it.
TEST(RemoteUpdates, RandomCapacitiesChangeNothing) {
    for (const std::uint64_t seed : seeds({.usual = 15, .full = 1'000})) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const std::size_t pages_here = 8 + random() % 8;
        const std::size_t pages_there = 16 + random() % 12;
        PageServer server(updating_options(pages_there));
        const auto pager = updating_pager(server.address(), pages_here);
        ASSERT_TRUE(pager->options().updates_below);
        SmallTraining training(*pager, seed, 3 + random() % 6, 3);
        for (int step = 0; step < 3; ++step) ASSERT_EQ(training.step(), 0u) << "step " << step;
        ASSERT_EQ(training.differences(), 0u);
        ASSERT_GT(server.statistics().updates, 0u);
        ASSERT_LE(pager->statistics().memory.peak_bytes, pages_here * kPageBytes);
        ASSERT_LE(server.statistics().pager.memory.peak_bytes, pages_there * kPageBytes);
    }
}

// States of updates at the store are never sent, and gradients once. Method: bytes by kind of four steps.
TEST(RemoteUpdates, OnlyGradientsGoThereAndWeightsComeBack) {
    PageServer server(updating_options(64));
    const auto pager = updating_pager(server.address(), 12);
    SmallTraining training(*pager, 7, 8, 3);
    std::size_t pages = 0;
    for (const auto& segment : training.segments())
        pages += segment->kind() == SegmentKind::state ? segment->page_count() : 0;
    for (int step = 0; step < 4; ++step) ASSERT_EQ(training.step(), 0u);
    const PagerStatistics moved = pager->statistics();
    const auto of_kind = [](SegmentKind kind) { return static_cast<std::size_t>(kind); };
    EXPECT_EQ(moved.read_bytes[of_kind(SegmentKind::state)], 0u);
    EXPECT_EQ(moved.written_bytes[of_kind(SegmentKind::state)], 0u);
    EXPECT_EQ(moved.read_bytes[of_kind(SegmentKind::gradient)], 0u);
    EXPECT_GT(moved.written_bytes[of_kind(SegmentKind::gradient)], 0u);
    EXPECT_LE(moved.written_bytes[of_kind(SegmentKind::gradient)], 4 * pages * kPageBytes);
    EXPECT_LE(moved.written_bytes[of_kind(SegmentKind::parameter)], pages * kPageBytes);  // only where it was made
    EXPECT_GT(moved.read_bytes[of_kind(SegmentKind::parameter)], 0u);
    EXPECT_GE(server.statistics().updates, 3 * pages);
    EXPECT_EQ(training.differences(), 0u);
}

// A page whose address somebody holds is updated where it lies, and so is one of an update that is larger than what the
// store takes; it is not sent there for it. Method: the weight of a layer pinned across a step; a store that has room
// for two pages of an update, and memory here for everything.
TEST(RemoteUpdates, WhatTheStoreCannotUpdateIsUpdatedHere) {
    PageServer server(updating_options(64));
    const auto pager = updating_pager(server.address(), 16);
    const auto held = filled_segment(*pager, 1, 1);
    const auto other = filled_segment(*pager, 1, 2);
    const std::vector<std::shared_ptr<Segment>> segments{held, other};
    {
        const PinGuard guard = pin(*pager, held, Access::read);
        const UpdateLatch latch = pager->latch_for_update(segments, 0, true);
        ASSERT_FALSE(latch.is_remote());
        EXPECT_EQ(latch.bytes(0).data(), held->range().data());
    }
    for (const auto& segment : segments) ASSERT_EQ(pager->evict(segment), 0u);
    EXPECT_TRUE(pager->latch_for_update(segments, 0, true).is_remote());
    PageServer small(updating_options(8));
    const auto narrow = updating_pager(small.address(), 256);
    SmallTraining training(*narrow, 1, 8, 3);
    for (int step = 0; step < 6; ++step) EXPECT_EQ(training.step(), 0u);
    EXPECT_EQ(small.statistics().received_bytes, 0u);
    EXPECT_EQ(training.differences(), 0u);
    EXPECT_EQ(small.statistics().updates, 0u);
}

// Where kernels may give other bits than the client's, updates stay with it. Method: another name of kernels; a store
// without updates; a client that asks for one all the same.
TEST(RemoteUpdates, OnlyAStoreWithTheSameKernelsUpdates) {
    const auto store_of = [](const PageServer& server, const char* kernels) {
        return RemoteStore(server.address(), kPageBytes, 8, {}, kernels).runs_work();
    };
    PageServer server(updating_options(64));
    EXPECT_TRUE(store_of(server, kKernels));
    EXPECT_FALSE(store_of(server, "others"));
    EXPECT_FALSE(store_of(server, ""));
    PageServer without(server_options(64));
    EXPECT_FALSE(store_of(without, kKernels));
    RawClient client(without.address());
    client.greet();
    const std::vector<std::byte> body(sizeof(MemberPage));
    MessageHeader update{.kind = MessageKind::update, .count = 1};
    update.body_checksum = checksum_of_body(update, body);
    client.say(update, body);
    EXPECT_EQ(client.hear(), MessageKind::failed);
    EXPECT_EQ(client.text, "this store runs no updates");
}

// An update that is damaged on its way, names too many pages or none, or is none that anybody knows, changes nothing
// and is answered; one that is too long ends the connection. Method: a client that says so.
TEST(RemoteUpdates, WhatCannotBeMeantIsAnswered) {
    PageServer server(updating_options(64));
    RawClient client(server.address());
    client.greet();
    const auto answer_to = [&](std::span<const MemberPage> members, std::uint64_t count, std::uint64_t flipped = 0) {
        MessageHeader update{.kind = MessageKind::update, .count = count};
        const auto body = std::as_bytes(members);
        update.body_checksum = checksum_of_body(update, body) ^ flipped;
        client.say(update, body);
        return client.hear();
    };
    const std::vector<MemberPage> member{{.segment = 3, .segment_bytes = kPageBytes, .page_bytes = kPageBytes}};
    EXPECT_EQ(answer_to(member, 1, 1), MessageKind::damaged);
    EXPECT_EQ(answer_to(member, 0), MessageKind::failed);
    EXPECT_EQ(answer_to(member, 2), MessageKind::failed);
    EXPECT_EQ(answer_to(member, 1), MessageKind::failed);
    EXPECT_EQ(client.text, "another update");
    EXPECT_EQ(answer_to(std::vector<MemberPage>{member.front(), member.front()}, 2), MessageKind::failed);
    EXPECT_EQ(client.text, "segment 3 is named twice in an update");
    EXPECT_EQ(answer_to(std::vector<MemberPage>{{.segment = 4, .segment_bytes = 9, .page_bytes = 7}}, 1),
              MessageKind::failed);
    EXPECT_EQ(client.text, "pages of 7 bytes; a store keeps multiples of 4096");
    const std::vector<std::byte> endless(kMaxUpdateBytes + 1);
    client.say({.kind = MessageKind::update, .count = 1}, std::span(endless).first(1));
    EXPECT_NE(client.hear(), MessageKind::updated);
    RawClient other(server.address());
    other.greet();
    other.channel.send({.kind = MessageKind::update, .count = 1}, endless);
    other.channel.flush();
    EXPECT_THROW(other.hear(), TierIoError);
}

// A page that an update would have let go is kept where it failed, and can be read. Method: work that fails after its
// first operator.
TEST(RemoteUpdates, FailedUpdateKeepsWhatItWouldHaveLetGo) {
    PageServerOptions options = updating_options(64);
    options.run_work = [](std::span<const std::byte>, std::span<const std::span<std::byte>>,
                          std::exception_ptr& error) {
        error = std::make_exception_ptr(InvalidArgument("the second operator"));
        return std::size_t{1};
    };
    PageServer server(options);
    const auto pager = updating_pager(server.address(), 16);
    const auto segment = filled_segment(*pager, 1, 1);
    ASSERT_EQ(pager->evict(segment), 0u);
    std::promise<std::exception_ptr> ended;
    {
        UpdateLatch latch = pager->latch_for_update({&segment, 1}, 0, true);
        ASSERT_TRUE(latch.is_remote());
        latch.run_remotely({{std::byte{1}},
                            {true},
                            [&](std::size_t, const std::exception_ptr& error) { ended.set_value(error); },
                            [](const std::exception_ptr&) {}});
        EXPECT_THROW(std::rethrow_exception(ended.get_future().get()), TierIoError);
    }
    const PinGuard guard = pin(*pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// A store that ends in the midst of updates is an error by name, and nothing waits for it for ever. Method: one that is
// destroyed while its only update waits.
TEST(RemoteUpdates, StoreThatGoesInTheMidstIsAnError) {
    std::promise<void> begun;
    std::promise<void> go_on;
    PageServerOptions options = updating_options(64);
    options.run_work = [&](std::span<const std::byte>, std::span<const std::span<std::byte>>, std::exception_ptr&) {
        begun.set_value();
        go_on.get_future().wait();
        return std::size_t{1};
    };
    auto server = std::make_unique<PageServer>(options);
    const auto pager = updating_pager(server->address(), 16);
    const auto segment = filled_segment(*pager, 1, 1);
    ASSERT_EQ(pager->evict(segment), 0u);
    const std::vector<std::shared_ptr<Segment>> segments{segment};
    UpdateLatch latch = pager->latch_for_update(segments, 0, true);
    ASSERT_TRUE(latch.is_remote());
    std::promise<std::exception_ptr> ended;
    latch.run_remotely({{std::byte{1}},
                        {false},
                        [&](std::size_t ran, std::exception_ptr error) { ended.set_value(ran == 0 ? error : nullptr); },
                        [](const std::exception_ptr&) {}});
    begun.get_future().wait();
    std::thread ends([&] { server.reset(); });
    const std::exception_ptr error = ended.get_future().get();
    go_on.set_value();
    ends.join();
    ASSERT_TRUE(error);
    try {
        std::rethrow_exception(error);
    } catch (const TierIoError& gone) {
        EXPECT_NE(std::string(gone.what()).find("updating page 0 of segment 1"), std::string::npos) << gone.what();
    }
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
