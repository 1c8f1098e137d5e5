#include "storage/uring_engine.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "conformance/io_engine_contract.h"

struct io_uring;

namespace {

// How often and with what this thread's next io_uring_submit calls are refused.
thread_local int refusal_count = 0;
thread_local int refusal_error = 0;

}  // namespace

// Stands before liburing's function of that name, so that tests can refuse a submission.
extern "C" int io_uring_submit(io_uring* ring) {
    using Submit = int (*)(io_uring*);
    static const auto real_submit = reinterpret_cast<Submit>(::dlsym(RTLD_NEXT, "io_uring_submit"));
    if (refusal_count == 0) return real_submit(ring);
    --refusal_count;
    return -refusal_error;
}

namespace torch_offload::test {
namespace {

struct UringEngineFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) {
        return make_io_engine(IoEngineKind::uring, capacity);
    }
};
struct FixedUringEngineFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) {
        return make_io_engine(IoEngineKind::uring_fixed, capacity);
    }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Uring, IoEngineContract, UringEngineFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(FixedUring, IoEngineContract, FixedUringEngineFactory);

class UringEngine : public ::testing::TestWithParam<IoEngineKind> {
protected:
    void SetUp() override {
        try {
            engine = make_io_engine(GetParam(), 4);
        } catch (const InvalidArgument& reason) {
            GTEST_SKIP() << reason.what();
        }
    }

    std::unique_ptr<IoEngine> engine;
    ScratchDirectory directory;
    BlockFile file{directory.path()};
    Extent extent = file.allocate(kMiB);
};
INSTANTIATE_TEST_SUITE_P(Kinds, UringEngine, ::testing::Values(IoEngineKind::uring, IoEngineKind::uring_fixed));

// The rest of a short transfer goes to the right place in memory. Method: a pipe that holds half of what is read, then
// the other half.
TEST_P(UringEngine, ShortTransferGoesOnWhereItStopped) {
    AlignedBuffer sent(8 * kSectorBytes);
    AlignedBuffer received(8 * kSectorBytes);
    sent.fill(1);
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    constexpr ssize_t kHalfBytes = 4 * kSectorBytes;
    ASSERT_EQ(::write(ends[1], sent.bytes().data(), kHalfBytes), kHalfBytes);
    IoRequest read{.file_descriptor = ends[0],
                   .buffer = received.bytes(),
                   .fixed_index = engine->register_buffer(received.bytes()),
                   .fixed_address = received.bytes().data()};
    IoRequest* pointer = &read;
    ASSERT_EQ(engine->submit({&pointer, 1}), 1u);
    ASSERT_EQ(engine->reap({&pointer, 1}, milliseconds{0}), 0u);
    ASSERT_EQ(::write(ends[1], sent.bytes().data() + kHalfBytes, kHalfBytes), kHalfBytes);
    ASSERT_EQ(engine->reap({&pointer, 1}, kLong), 1u);
    EXPECT_EQ(read.error, 0);
    EXPECT_GE(read.rounds, 1u);
    EXPECT_TRUE(received == sent);
    ::close(ends[0]);
    ::close(ends[1]);
}

// Entries that the kernel refuses for now stay queued and are served later. Method: refuse submissions by EINTR, EAGAIN
// and EBUSY before each of many transfers.
TEST_P(UringEngine, RefusedSubmissionIsMadeGood) {
    AlignedBuffer memory(kSectorBytes);
    for (const int error : {EINTR, EAGAIN, EBUSY}) {
        for (int count = 1; count <= 3; ++count) {
            std::vector<IoRequest> writes(3, {.direction = IoDirection::write,
                                              .file_descriptor = file.file_descriptor(),
                                              .offset_bytes = extent.offset_bytes,
                                              .buffer = memory.bytes()});
            refusal_error = error;
            refusal_count = count;
            for (IoRequest& write : writes) {
                IoRequest* pointer = &write;
                ASSERT_EQ(engine->submit({&pointer, 1}), 1u);
            }
            EXPECT_EQ(reap_all(*engine, writes.size()).size(), writes.size());
            refusal_count = 0;
            for (const IoRequest& write : writes) EXPECT_EQ(write.error, 0);
        }
    }
}

// A ring that refuses a submission for good is replaced, and its transfers are made all the same. Method: refuse by
// EBADR with one transfer in flight.
TEST_P(UringEngine, BrokenRingIsReplaced) {
    AlignedBuffer memory(2 * kSectorBytes);
    memory.fill(7);
    std::vector<IoRequest> writes(2);
    for (std::size_t i = 0; i < 2; ++i) {
        writes[i].direction = IoDirection::write;
        writes[i].file_descriptor = file.file_descriptor();
        writes[i].offset_bytes = file.allocate(kSectorBytes).offset_bytes;
        writes[i].buffer = memory.bytes().subspan(i * kSectorBytes, kSectorBytes);
        IoRequest* pointer = &writes[i];
        if (i == 1) {
            refusal_error = EBADR;
            refusal_count = 1;
        }
        EXPECT_EQ(engine->submit({&pointer, 1}), 1u);
    }
    std::size_t reaped = 0;
    std::array<IoRequest*, 2> finished{};
    for (int i = 0; i < 10 && reaped < 2; ++i) reaped += engine->reap(finished, kLong);  // 0 after a wake
    ASSERT_EQ(reaped, 2u);
    EXPECT_EQ(engine->name(), "threads");
    for (const IoRequest& write : writes) EXPECT_EQ(write.error, 0);
    AlignedBuffer read(2 * kSectorBytes);
    for (std::size_t i = 0; i < 2; ++i) {
        const std::span<std::byte> half = read.bytes().subspan(i * kSectorBytes, kSectorBytes);
        ASSERT_EQ(::pread(file.file_descriptor(), half.data(), half.size(), static_cast<off_t>(writes[i].offset_bytes)),
                  static_cast<ssize_t>(half.size()));
    }
    EXPECT_TRUE(read == memory);
}

// A submission that fails for good is a typed error of the ring, and it can be destroyed. Method: refuse by EBADR.
TEST_P(UringEngine, BrokenRingIsATierError) {
    engine = make_uring_engine(GetParam() == IoEngineKind::uring_fixed ? UringBuffers::fixed : UringBuffers::plain, 4);
    AlignedBuffer memory(kSectorBytes);
    IoRequest write{.direction = IoDirection::write,
                    .file_descriptor = file.file_descriptor(),
                    .offset_bytes = extent.offset_bytes,
                    .buffer = memory.bytes()};
    IoRequest* pointer = &write;
    refusal_error = EBADR;
    refusal_count = 1;
    EXPECT_THROW(engine->submit({&pointer, 1}), TierIoError);
    engine.reset();
}

// A forked child that lets go of its copy leaves the parent's transfers alone. Method: fork with a read in flight.
TEST_P(UringEngine, ForkedChildLetsGo) {
    AlignedBuffer written(kMiB);
    AlignedBuffer read(kMiB);
    written.fill(1);
    IoRequest request{.direction = IoDirection::write,
                      .file_descriptor = file.file_descriptor(),
                      .offset_bytes = extent.offset_bytes,
                      .buffer = written.bytes()};
    transfer(*engine, request);
    request.direction = IoDirection::read;
    request.buffer = read.bytes();
    IoRequest* pointer = &request;
    ASSERT_EQ(engine->submit({&pointer, 1}), 1u);
    const pid_t child = ::fork();
    if (child == 0) {
        engine.reset();
        ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    ASSERT_EQ(engine->reap({&pointer, 1}, kLong), 1u);
    EXPECT_EQ(request.error, 0);
    EXPECT_TRUE(read == written);
}

class UringBuffersTest : public ::testing::Test {
protected:
    void SetUp() override {
        try {
            engine = FixedUringEngineFactory::make(4);
        } catch (const InvalidArgument& reason) {
            GTEST_SKIP() << reason.what();
        }
    }

    std::unique_ptr<IoEngine> engine;
};

// A registration follows the memory when mremap moves it. Method: register, move elsewhere, leave other bytes at the
// old address, write by the old address, read back plainly.
TEST_F(UringBuffersTest, RegistrationFollowsMovedMemory) {
    constexpr std::size_t kBytes = kMiB;
    const auto map = [](int protection) {
        return static_cast<std::byte*>(::mmap(nullptr, kBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    };
    AlignedBuffer expected(kBytes);
    expected.fill(3);
    std::byte* const home = map(PROT_READ | PROT_WRITE);
    std::memcpy(home, expected.bytes().data(), kBytes);
    const BufferIndex index = engine->register_buffer({home, kBytes});
    ASSERT_NE(index, kUnregistered);
    std::byte* const away = map(PROT_NONE);
    ASSERT_EQ(::mremap(home, kBytes, kBytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, away), away);

    ScratchDirectory directory;
    BlockFile file(directory.path());
    const Extent extent = file.allocate(kBytes);
    IoRequest write{.direction = IoDirection::write,
                    .file_descriptor = file.file_descriptor(),
                    .offset_bytes = extent.offset_bytes,
                    .buffer = {away, kBytes},
                    .fixed_index = index,
                    .fixed_address = home};
    transfer(*engine, write);
    EXPECT_EQ(write.error, 0);
    AlignedBuffer back(kBytes);
    IoRequest read{
        .file_descriptor = file.file_descriptor(), .offset_bytes = extent.offset_bytes, .buffer = back.bytes()};
    transfer(*engine, read);
    EXPECT_TRUE(back == expected);

    std::memset(away, 0, kBytes);
    read.buffer = {away, kBytes};
    read.fixed_index = index;
    read.fixed_address = home;
    transfer(*engine, read);
    EXPECT_EQ(read.error, 0);
    EXPECT_EQ(std::memcmp(away, expected.bytes().data(), kBytes), 0);
    engine->unregister_buffer(index);
    ::munmap(home, kBytes);
    ::munmap(away, kBytes);
}

// A full table gives kUnregistered, never an error, and an emptied slot is used again. Method: fill all 16384 slots.
TEST_F(UringBuffersTest, FullTableIsAHint) {
    AlignedBuffer memory(kSectorBytes);
    std::set<BufferIndex> indices;
    BufferIndex index = kUnregistered;
    while ((index = engine->register_buffer(memory.bytes())) != kUnregistered) {
        ASSERT_TRUE(indices.insert(index).second);
    }
    EXPECT_GT(indices.size(), 0u);
    EXPECT_LE(indices.size(), 16384u);
    engine->unregister_buffer(*indices.begin());
    EXPECT_EQ(engine->register_buffer(memory.bytes()), *indices.begin());
}

// A destroyed engine has given its locked memory back. Method: a child without privileges, limited to 1 MiB of locked
// memory, fills it four times, each time with a new engine.
TEST_F(UringBuffersTest, LockedMemoryIsGivenBack) {
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit limit{kMiB, kMiB};
        if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) ::_exit(2);
        // The kernel counts locked memory by user: one of this process's own, where it may choose.
        const auto own_user = static_cast<uid_t>(1'000'000 + ::getpid());
        if (::geteuid() == 0 && ::setuid(own_user) != 0) ::_exit(3);
        const AlignedBuffer memory(4 * kMiB);
        for (int round = 0; round < 4; ++round) {
            const auto own = make_uring_engine(UringBuffers::fixed, 4);
            std::size_t count = 0;
            while (own->register_buffer(memory.bytes().subspan(count * 64 * kKiB, 64 * kKiB)) != kUnregistered) ++count;
            if (count < 8 || count > 16) ::_exit(4);
        }
        ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// Memory that cannot be registered is a hint, not an error. Method: an address range without memory.
TEST_F(UringBuffersTest, UnregistrableMemoryIsAHint) {
    void* const nothing = ::mmap(nullptr, kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_EQ(engine->register_buffer({static_cast<std::byte*>(nothing), kMiB}), kUnregistered);
    EXPECT_EQ(engine->register_buffer({}), kUnregistered);
    ::munmap(nothing, kMiB);
    AlignedBuffer memory(kSectorBytes);
    EXPECT_NE(engine->register_buffer(memory.bytes()), kUnregistered);
}

// A second thread is told, not served. Method: reap here, then submit there.
TEST_F(UringBuffersTest, BelongsToTheThreadOfTheFirstCall) {
    IoRequest* finished = nullptr;
    EXPECT_EQ(engine->reap({&finished, 1}, milliseconds{0}), 0u);
    std::thread([&] { EXPECT_THROW(engine->reap({&finished, 1}, milliseconds{0}), LogicError); }).join();
}

// Capacities that no ring has are refused. Method: 0 and far too many.
TEST(UringCapacity, RefusesImpossibleCapacity) {
    EXPECT_THROW(make_io_engine(IoEngineKind::uring, 0), InvalidArgument);
    EXPECT_THROW(make_uring_engine(UringBuffers::plain, 1'000'000), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload::test
