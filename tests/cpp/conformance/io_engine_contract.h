// What every IoEngine promises, as a typed suite. A factory has `static std::unique_ptr<IoEngine> make(capacity)`,
// which throws InvalidArgument where the system cannot have that engine.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "storage/block_file.h"
#include "storage/io_engine.h"
#include "support/aligned_buffer.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {

using std::chrono::milliseconds;
inline constexpr milliseconds kLong{30'000};  // longer than any test; reached only by a defect

/// Reaps until `count` requests came back.
inline std::vector<IoRequest*> reap_all(IoEngine& engine, std::size_t count, std::size_t batch = 16) {
    std::vector<IoRequest*> all;
    std::vector<IoRequest*> finished(batch);
    while (all.size() < count) {
        const std::size_t got = engine.reap(finished, kLong);
        if (got == 0) break;
        all.insert(all.end(), finished.begin(), finished.begin() + static_cast<std::ptrdiff_t>(got));
    }
    return all;
}

/// One transfer through `engine`, start to end.
inline void transfer(IoEngine& engine, IoRequest& request) {
    IoRequest* pointer = &request;
    ASSERT_EQ(engine.submit({&pointer, 1}), 1u);
    ASSERT_EQ(reap_all(engine, 1), std::vector<IoRequest*>{&request});
}

template <typename Factory>
class IoEngineContract : public ::testing::Test {
protected:
    void SetUp() override {
        try {
            engine = Factory::make(8);
        } catch (const InvalidArgument& reason) {
            GTEST_SKIP() << reason.what();
        }
    }

    IoRequest request(IoDirection direction, std::uint64_t offset_bytes, std::span<std::byte> buffer) const {
        return {.direction = direction,
                .file_descriptor = file.file_descriptor(),
                .offset_bytes = extent.offset_bytes + offset_bytes,
                .buffer = buffer};
    }

    ScratchDirectory directory;
    BlockFile file{directory.path()};
    Extent extent = file.allocate(32 * kMiB);
    std::unique_ptr<IoEngine> engine;
};

TYPED_TEST_SUITE_P(IoEngineContract);

// What was written is read back, whatever the size and place. Method: one request at a time, sizes up to 8 MiB.
TYPED_TEST_P(IoEngineContract, BytesComeBack) {
    for (const std::size_t size_bytes : {4 * kKiB, 12 * kKiB, kMiB, 8 * kMiB}) {
        AlignedBuffer written(size_bytes);
        AlignedBuffer read(size_bytes);
        written.fill(size_bytes);
        IoRequest write = this->request(IoDirection::write, 3 * kSectorBytes, written.bytes());
        transfer(*this->engine, write);
        EXPECT_EQ(write.error, 0);
        EXPECT_EQ(write.done_bytes, size_bytes);
        IoRequest back = this->request(IoDirection::read, 3 * kSectorBytes, read.bytes());
        transfer(*this->engine, back);
        EXPECT_EQ(back.error, 0);
        EXPECT_TRUE(read == written) << size_bytes;
    }
}

// A tail takes the bytes that follow, in both directions. Method: the same bytes through one buffer, and in two pieces
// of every proportion.
TYPED_TEST_P(IoEngineContract, ATailTakesWhatFollows) {
    constexpr std::size_t kSectors = 5;
    AlignedBuffer written(kSectors * kSectorBytes);
    written.fill(kSectors);
    for (std::size_t sectors = 1; sectors < kSectors; ++sectors) {
        const std::size_t size_bytes = sectors * kSectorBytes;
        AlignedBuffer front(size_bytes), back(written.bytes().size() - size_bytes), whole(written.bytes().size());
        IoRequest write = this->request(IoDirection::write, kSectorBytes, written.bytes().first(size_bytes));
        write.tail = written.bytes().subspan(size_bytes);
        transfer(*this->engine, write);
        EXPECT_EQ(write.error, 0);
        EXPECT_EQ(write.done_bytes, written.bytes().size());
        IoRequest read = this->request(IoDirection::read, kSectorBytes, whole.bytes());
        transfer(*this->engine, read);
        EXPECT_TRUE(whole == written) << sectors;
        IoRequest in_pieces = this->request(IoDirection::read, kSectorBytes, front.bytes());
        in_pieces.tail = back.bytes();
        transfer(*this->engine, in_pieces);
        EXPECT_EQ(in_pieces.error, 0);
        EXPECT_TRUE(std::ranges::equal(front.bytes(), written.bytes().first(size_bytes))) << sectors;
        EXPECT_TRUE(std::ranges::equal(back.bytes(), written.bytes().subspan(size_bytes))) << sectors;
    }
}

// A full engine takes the front of a batch and leaves the rest to the caller. Method: three times its capacity.
TYPED_TEST_P(IoEngineContract, TakesNoMoreThanItsCapacity) {
    const std::size_t capacity = this->engine->capacity();
    AlignedBuffer memory(kSectorBytes);
    std::vector<IoRequest> requests(3 * capacity, this->request(IoDirection::write, 0, memory.bytes()));
    std::vector<IoRequest*> waiting;
    for (IoRequest& request : requests) waiting.push_back(&request);
    ASSERT_EQ(this->engine->submit(waiting), capacity);
    EXPECT_EQ(this->engine->submit(std::span(waiting).subspan(capacity)), 0u);
    for (std::size_t taken = capacity; taken < waiting.size();) {
        IoRequest* finished = nullptr;
        ASSERT_EQ(this->engine->reap({&finished, 1}, kLong), 1u);
        EXPECT_LT(finished, &requests[taken]);
        ASSERT_EQ(this->engine->submit(std::span(waiting).subspan(taken)), 1u);
        ++taken;
    }
    EXPECT_EQ(reap_all(*this->engine, capacity).size(), capacity);
}

// Each request comes back exactly once, also when more are done than asked for. Method: reap one, then three at a time.
TYPED_TEST_P(IoEngineContract, EachRequestComesBackOnce) {
    AlignedBuffer memory(kSectorBytes);
    for (const std::size_t batch : {1, 3}) {
        std::vector<IoRequest> requests(8, this->request(IoDirection::write, 0, memory.bytes()));
        std::vector<IoRequest*> pointers;
        for (IoRequest& request : requests) pointers.push_back(&request);
        ASSERT_EQ(this->engine->submit(pointers), 8u);
        const std::vector<IoRequest*> back = reap_all(*this->engine, 8, batch);
        EXPECT_EQ(std::set<IoRequest*>(back.begin(), back.end()).size(), 8u);
        IoRequest* nothing = nullptr;
        EXPECT_EQ(this->engine->reap({&nothing, 1}, milliseconds{0}), 0u);
    }
}

// Many transfers in flight never mix their bytes. Method: seeded rounds of writes and reads of 64 disjoint blocks.
TYPED_TEST_P(IoEngineContract, TransfersInFlightStayApart) {
    constexpr std::size_t kBlocks = 64;
    constexpr std::size_t kBlockBytes = 64 * kKiB;
    std::vector<AlignedBuffer> written, read;
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < kBlocks; ++i) {
        written.emplace_back(kBlockBytes).fill(i + 1);
        read.emplace_back(kBlockBytes);
    }
    std::mt19937_64 random(7);
    for (const IoDirection direction : {IoDirection::write, IoDirection::read}) {
        requests.clear();
        for (std::size_t i = 0; i < kBlocks; ++i) {
            auto& memory = direction == IoDirection::write ? written[i] : read[i];
            requests.push_back(this->request(direction, i * kBlockBytes, memory.bytes()));
        }
        std::vector<IoRequest*> waiting;
        for (IoRequest& request : requests) waiting.push_back(&request);
        std::ranges::shuffle(waiting, random);
        std::size_t taken = 0, back = 0;
        while (back < kBlocks) {
            taken += this->engine->submit(std::span(waiting).subspan(taken));
            back += reap_all(*this->engine, 1, 4).size();
        }
        for (const IoRequest& request : requests) EXPECT_EQ(request.error, 0);
    }
    for (std::size_t i = 0; i < kBlocks; ++i) EXPECT_TRUE(read[i] == written[i]) << i;
}

// An idle reap waits its timeout and no longer. Method: the clock.
TYPED_TEST_P(IoEngineContract, IdleReapWaitsItsTimeout) {
    IoRequest* finished = nullptr;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(this->engine->reap({&finished, 1}, milliseconds{20}), 0u);
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT_GE(waited, milliseconds{19});
    EXPECT_LT(waited, kLong);
}

// A wake() before the reap is not lost, and counts once. Method: wake twice, reap, reap again with a short timeout.
TYPED_TEST_P(IoEngineContract, WakeBeforeReapIsKept) {
    IoRequest* finished = nullptr;
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < 3; ++round) {
        this->engine->wake();
        this->engine->wake();
        EXPECT_EQ(this->engine->reap({&finished, 1}, kLong), 0u);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, kLong);
    EXPECT_EQ(this->engine->reap({&finished, 1}, milliseconds{20}), 0u);
    EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds{19});
}

// A wake() from another thread ends a reap that waits. Method: ping-pong, so that wakes fall before and into the wait.
TYPED_TEST_P(IoEngineContract, WakeFromAnotherThread) {
    std::atomic<int> asked{0};
    std::thread waker([&] {
        for (int round = 1; round <= 100; ++round) {
            while (asked.load() < round) std::this_thread::yield();
            this->engine->wake();
        }
    });
    const auto start = std::chrono::steady_clock::now();
    IoRequest* finished = nullptr;
    for (int round = 1; round <= 100; ++round) {
        asked.store(round);
        EXPECT_EQ(this->engine->reap({&finished, 1}, kLong), 0u);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, kLong);
    waker.join();
}

// wake() may be called by a signal handler. Method: raise a signal whose handler wakes, then reap.
TYPED_TEST_P(IoEngineContract, WakeFromASignalHandler) {
    static std::atomic<IoEngine*> woken{nullptr};
    woken = this->engine.get();
    struct sigaction action{}, previous{};
    action.sa_handler = [](int) { woken.load()->wake(); };
    ASSERT_EQ(::sigaction(SIGUSR1, &action, &previous), 0);
    ASSERT_EQ(::raise(SIGUSR1), 0);
    ASSERT_EQ(::sigaction(SIGUSR1, &previous, nullptr), 0);
    const auto start = std::chrono::steady_clock::now();
    IoRequest* finished = nullptr;
    EXPECT_EQ(this->engine->reap({&finished, 1}, kLong), 0u);
    EXPECT_LT(std::chrono::steady_clock::now() - start, kLong);
}

// A wake() does not lose or hold back transfers. Method: wake between submit and reap, many times.
TYPED_TEST_P(IoEngineContract, WakeAmongTransfers) {
    AlignedBuffer memory(kSectorBytes);
    for (int round = 0; round < 200; ++round) {
        IoRequest write = this->request(IoDirection::write, 0, memory.bytes());
        IoRequest* pointer = &write;
        ASSERT_EQ(this->engine->submit({&pointer, 1}), 1u);
        this->engine->wake();
        IoRequest* finished = nullptr;
        int empty_count = 0;
        while (this->engine->reap({&finished, 1}, kLong) == 0) ++empty_count;
        EXPECT_EQ(finished, &write);
        EXPECT_LE(empty_count, 2);  // this round's wake and the last one's, if that reap found its transfer first
    }
}

// A transfer past the end of the file is an error that says how far it came. Method: read over the end.
TYPED_TEST_P(IoEngineContract, ReadingPastTheEndIsAnError) {
    AlignedBuffer memory(8 * kSectorBytes);
    const std::uint64_t end_bytes = this->file.size_bytes();
    IoRequest write = this->request(IoDirection::write, 0, memory.bytes());
    write.offset_bytes = end_bytes - 8 * kSectorBytes;
    transfer(*this->engine, write);
    ASSERT_EQ(write.error, 0);
    IoRequest over = this->request(IoDirection::read, 0, memory.bytes());
    over.offset_bytes = end_bytes - 3 * kSectorBytes;
    transfer(*this->engine, over);
    EXPECT_EQ(over.error, EIO);
    EXPECT_EQ(over.done_bytes, 3 * kSectorBytes);
}

// A request that fails does not disturb the others of its batch. Method: a bad descriptor in the middle.
TYPED_TEST_P(IoEngineContract, FailureStaysWithItsRequest) {
    AlignedBuffer memory(kSectorBytes);
    std::vector<IoRequest> requests(3, this->request(IoDirection::write, 0, memory.bytes()));
    requests[1].file_descriptor = -1;
    std::vector<IoRequest*> pointers{&requests[0], &requests[1], &requests[2]};
    ASSERT_EQ(this->engine->submit(pointers), 3u);
    ASSERT_EQ(reap_all(*this->engine, 3).size(), 3u);
    EXPECT_EQ(requests[0].error, 0);
    EXPECT_EQ(requests[1].error, EBADF);
    EXPECT_EQ(requests[2].error, 0);
    requests[1].file_descriptor = this->file.file_descriptor();
    transfer(*this->engine, requests[1]);
    EXPECT_EQ(requests[1].error, 0);  // a request may be used again; nothing of the failure stays
}

// Units are checked before anything is taken. Method: a good request and one with an odd offset, address or size.
TYPED_TEST_P(IoEngineContract, OddUnitsAreRefused) {
    AlignedBuffer memory(2 * kSectorBytes);
    IoRequest good = this->request(IoDirection::write, 0, memory.bytes());
    IoRequest odd_tail = this->request(IoDirection::write, 0, memory.bytes().first(kSectorBytes));
    odd_tail.tail = memory.bytes().subspan(kSectorBytes, 100);
    IoRequest fixed_with_tail = this->request(IoDirection::write, 0, memory.bytes().first(kSectorBytes));
    fixed_with_tail.tail = memory.bytes().subspan(kSectorBytes);
    fixed_with_tail.fixed_index = 0;
    for (IoRequest bad : {this->request(IoDirection::write, 512, memory.bytes()),
                          this->request(IoDirection::write, 0, memory.bytes().subspan(8, kSectorBytes)),
                          this->request(IoDirection::write, 0, memory.bytes().first(100)),
                          this->request(IoDirection::write, 0, {}), odd_tail, fixed_with_tail}) {
        std::vector<IoRequest*> pointers{&good, &bad};
        EXPECT_THROW(this->engine->submit(pointers), InvalidArgument);
    }
    IoRequest* finished = nullptr;
    EXPECT_EQ(this->engine->reap({&finished, 1}, milliseconds{0}), 0u);
}

// A registered buffer serves transfers, part of it too, and its slot can be used again. Method: 100 rounds.
TYPED_TEST_P(IoEngineContract, RegisteredBuffers) {
    AlignedBuffer written(4 * kSectorBytes);
    AlignedBuffer read(4 * kSectorBytes);
    for (int round = 0; round < 100; ++round) {
        written.fill(static_cast<std::uint64_t>(round));
        const BufferIndex from = this->engine->register_buffer(written.bytes());
        const BufferIndex to = this->engine->register_buffer(read.bytes());
        IoRequest write = this->request(IoDirection::write, 0, written.bytes().subspan(kSectorBytes));
        write.fixed_index = from;
        write.fixed_address = write.buffer.data();
        transfer(*this->engine, write);
        IoRequest back = this->request(IoDirection::read, 0, read.bytes().subspan(kSectorBytes));
        back.fixed_index = to;
        back.fixed_address = back.buffer.data();
        transfer(*this->engine, back);
        ASSERT_EQ(write.error, 0);
        ASSERT_EQ(back.error, 0);
        EXPECT_TRUE(std::ranges::equal(written.bytes().subspan(kSectorBytes), read.bytes().subspan(kSectorBytes)));
        this->engine->unregister_buffer(from);
        this->engine->unregister_buffer(to);
    }
}

// An engine made by one thread may be used by another, the one of the first call. Method: make here, use there.
TYPED_TEST_P(IoEngineContract, UsedByAnotherThreadThanItsMaker) {
    AlignedBuffer memory(kSectorBytes);
    IoRequest write = this->request(IoDirection::write, 0, memory.bytes());
    std::thread([&] { transfer(*this->engine, write); }).join();
    EXPECT_EQ(write.error, 0);
    EXPECT_EQ(write.done_bytes, kSectorBytes);
}

// After an engine is destroyed, no transfer touches memory, whichever thread destroys it.
// Method: reads in flight, destroy, overwrite their memory, make the disk work, look again.
TYPED_TEST_P(IoEngineContract, DestroyedWithTransfersInFlight) {
    constexpr std::size_t kReads = 8;
    constexpr std::size_t kReadBytes = 4 * kMiB;
    AlignedBuffer memory(kReads * kReadBytes);
    memory.fill(1);
    IoRequest write = this->request(IoDirection::write, 0, memory.bytes());
    transfer(*TypeParam::make(1), write);
    AlignedBuffer marked(kReads * kReadBytes);
    marked.fill(2);
    std::vector<IoRequest> reads;
    std::vector<IoRequest*> pointers;
    for (std::size_t i = 0; i < kReads; ++i) {
        const auto part = memory.bytes().subspan(i * kReadBytes, kReadBytes);
        reads.push_back(this->request(IoDirection::read, i * kReadBytes, part));
    }
    for (IoRequest& read : reads) pointers.push_back(&read);
    const auto check_untouched = [&] {
        memory.fill(2);
        AlignedBuffer other(kReads * kReadBytes);
        IoRequest elsewhere = this->request(IoDirection::read, 0, other.bytes());
        transfer(*TypeParam::make(1), elsewhere);
        EXPECT_TRUE(memory == marked);
    };
    ASSERT_EQ(this->engine->submit(pointers), kReads);
    this->engine.reset();
    check_untouched();

    this->engine = TypeParam::make(kReads);
    std::thread([&] { ASSERT_EQ(this->engine->submit(pointers), kReads); }).join();
    this->engine.reset();
    check_untouched();
}

REGISTER_TYPED_TEST_SUITE_P(IoEngineContract, BytesComeBack, ATailTakesWhatFollows, TakesNoMoreThanItsCapacity,
                            EachRequestComesBackOnce, TransfersInFlightStayApart, IdleReapWaitsItsTimeout,
                            WakeBeforeReapIsKept, WakeFromAnotherThread, WakeFromASignalHandler, WakeAmongTransfers,
                            ReadingPastTheEndIsAnError, FailureStaysWithItsRequest, OddUnitsAreRefused,
                            RegisteredBuffers, UsedByAnotherThreadThanItsMaker, DestroyedWithTransfersInFlight);

}  // namespace torch_offload::test
