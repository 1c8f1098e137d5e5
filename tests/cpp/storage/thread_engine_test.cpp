#include "storage/thread_engine.h"

#include <dlfcn.h>
#include <sys/uio.h>

#include <cerrno>

#include "conformance/io_engine_contract.h"

namespace {

/// What every transfer by system call meets: the most bytes it moves, and how many calls are interrupted first.
std::atomic<std::size_t> most_bytes{SIZE_MAX};
std::atomic<int> interruption_count{0};

template <typename Call>
ssize_t transfer_some(Call real_call, int file, const iovec* pieces, off_t offset) {
    if (interruption_count.load() > 0 && interruption_count.fetch_sub(1) > 0) {
        errno = EINTR;
        return -1;
    }
    const iovec piece{pieces->iov_base, std::min(pieces->iov_len, most_bytes.load())};
    return real_call(file, &piece, 1, offset);
}

using Transfer = ssize_t (*)(int, const iovec*, int, off_t);

}  // namespace

// Stand before the C library's functions of those names, so that tests can shorten and interrupt transfers.
extern "C" ssize_t preadv(int file, const iovec* pieces, int, off_t offset) {
    static const auto real_call = reinterpret_cast<Transfer>(::dlsym(RTLD_NEXT, "preadv"));
    return transfer_some(real_call, file, pieces, offset);
}
extern "C" ssize_t pwritev(int file, const iovec* pieces, int, off_t offset) {
    static const auto real_call = reinterpret_cast<Transfer>(::dlsym(RTLD_NEXT, "pwritev"));
    return transfer_some(real_call, file, pieces, offset);
}

namespace torch_offload::test {
namespace {

struct ThreadEngineFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) { return std::make_unique<ThreadEngine>(capacity); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Threads, IoEngineContract, ThreadEngineFactory);

// I/O threads take no signals: Python's handlers run where Python expects them. Method: a process-directed signal
// while the only thread that may take it is this one, blocked, leaves the signal pending.
TEST(ThreadEngine, ItsThreadsBlockSignals) {
    ThreadEngine engine(4);
    sigset_t wanted, previous, pending;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR2);
    ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &wanted, &previous), 0);
    ASSERT_EQ(::kill(::getpid(), SIGUSR2), 0);
    ASSERT_EQ(sigpending(&pending), 0);
    EXPECT_EQ(sigismember(&pending, SIGUSR2), 1);
    int taken = 0;
    EXPECT_EQ(sigwait(&wanted, &taken), 0);
    ASSERT_EQ(pthread_sigmask(SIG_SETMASK, &previous, nullptr), 0);
}

// Short and interrupted transfers go on where they stopped. Method: at most five sectors a call, some interrupted.
TEST(ThreadEngine, ShortTransferGoesOnWhereItStopped) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    ThreadEngine engine(2);
    AlignedBuffer written(64 * kSectorBytes);
    AlignedBuffer read(64 * kSectorBytes);
    written.fill(1);
    IoRequest request{.direction = IoDirection::write,
                      .file_descriptor = file.file_descriptor(),
                      .offset_bytes = file.allocate(kMiB).offset_bytes,
                      .buffer = written.bytes()};
    most_bytes = 5 * kSectorBytes;
    interruption_count = 3;
    transfer(engine, request);
    EXPECT_EQ(request.error, 0);
    EXPECT_EQ(request.rounds, 12u + 3u);
    request.direction = IoDirection::read;
    request.buffer = read.bytes();
    transfer(engine, request);
    most_bytes = SIZE_MAX;
    EXPECT_EQ(request.error, 0);
    EXPECT_TRUE(read == written);
}

// A capacity of nothing is refused. Method: construct.
TEST(ThreadEngine, RefusesZeroCapacity) { EXPECT_THROW(ThreadEngine(0), InvalidArgument); }

}  // namespace
}  // namespace torch_offload::test
