#include "storage/io_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/units.h"
#include "support/aligned_buffer.h"
#include "support/log_capture.h"
#include "support/refuse_system_call.h"

namespace torch_offload::test {
namespace {

class Settle : public ::testing::Test {
protected:
    AlignedBuffer memory{4 * kSectorBytes};
    IoRequest request{.buffer = memory.bytes()};
};

// A whole transfer is finished without error. Method: its exact size.
TEST_F(Settle, WholeTransfer) {
    EXPECT_EQ(settle(request, 4 * kSectorBytes), Next::finished);
    EXPECT_EQ(request.error, 0);
    EXPECT_EQ(request.done_bytes, 4 * kSectorBytes);
}

// A short transfer goes round again from the last whole sector. Method: one sector and a bit, then the rest.
TEST_F(Settle, ShortTransferRestartsOnASector) {
    EXPECT_EQ(settle(request, kSectorBytes + 700), Next::resubmit);
    EXPECT_EQ(request.done_bytes, kSectorBytes);
    EXPECT_EQ(settle(request, 3 * kSectorBytes), Next::finished);
    EXPECT_EQ(request.error, 0);
    EXPECT_EQ(request.rounds, 1u);
}

// A transfer with a tail is whole when that is, and goes on within it. Method: short before, at and behind the border.
TEST_F(Settle, ATailIsPartOfTheTransfer) {
    request.buffer = memory.bytes().first(2 * kSectorBytes);
    request.tail = memory.bytes().subspan(2 * kSectorBytes);
    const std::byte* expected = memory.bytes().data();
    for (const std::size_t pieces : {2u, 2u, 1u, 1u}) {
        const std::span<const iovec> left = pieces_left(request);
        ASSERT_EQ(left.size(), pieces);
        EXPECT_EQ(left.front().iov_base, expected);
        std::size_t left_bytes = 0;
        for (const iovec& piece : left) left_bytes += piece.iov_len;
        EXPECT_EQ(left_bytes, request.size_bytes() - request.done_bytes);
        expected += kSectorBytes;
        const bool is_last = left_bytes == kSectorBytes;
        EXPECT_EQ(settle(request, kSectorBytes), is_last ? Next::finished : Next::resubmit);
    }
    EXPECT_EQ(request.error, 0);
    EXPECT_TRUE(pieces_left(request).empty());
}

// Interruptions and shortness end after kMaxRounds, in what the last one was. Method: nothing but EINTR, EAGAIN and
// single bytes.
TEST_F(Settle, RoundsAreBounded) {
    for (const std::int64_t result : {std::int64_t{-EINTR}, std::int64_t{-EAGAIN}, std::int64_t{1}}) {
        start_over(request);
        std::uint32_t count = 1;
        while (settle(request, result) == Next::resubmit) ASSERT_LT(++count, 2 * kMaxRounds);
        EXPECT_EQ(count, kMaxRounds);
        EXPECT_EQ(request.error, result < 0 ? static_cast<int>(-result) : EIO);
    }
}

// What may pass is what a controller or a kernel short of memory says; a full disk or a wrong call does not pass.
// Method: some of each.
TEST(MayPass, KnowsWhatDoesNotPassByItself) {
    for (const int error : {EIO, ENOMEM, ETIMEDOUT, ENODEV, ESTALE, EAGAIN}) EXPECT_TRUE(may_pass(error)) << error;
    for (const int error : {0, ENOSPC, EDQUOT, EROFS, EINVAL, EBADF, EPERM}) EXPECT_FALSE(may_pass(error)) << error;
}

// EIO is repeated once. Method: once and good; twice.
TEST_F(Settle, InputOutputErrorIsRepeatedOnce) {
    EXPECT_EQ(settle(request, -EIO), Next::resubmit);
    EXPECT_EQ(settle(request, 4 * kSectorBytes), Next::finished);
    EXPECT_EQ(request.error, 0);
    start_over(request);
    EXPECT_EQ(settle(request, -EIO), Next::resubmit);
    EXPECT_EQ(settle(request, -EIO), Next::finished);
    EXPECT_EQ(request.error, EIO);
    EXPECT_EQ(request.retries, 1u);
}

// Any other errno is the request's error at once. Method: a list of them.
TEST_F(Settle, OtherErrorsAreFinal) {
    for (const int error : {ENOSPC, EBADF, EFAULT, EINVAL, ENOMEM, EDQUOT, ECANCELED, EFBIG}) {
        start_over(request);
        EXPECT_EQ(settle(request, -error), Next::finished);
        EXPECT_EQ(request.error, error);
    }
}

// Nothing transferred means the file is too short, and more than asked for is a lie: both EIO. Method: 0; a byte more.
TEST_F(Settle, ImpossibleResultsAreErrors) {
    EXPECT_EQ(settle(request, 0), Next::finished);
    EXPECT_EQ(request.error, EIO);
    start_over(request);
    EXPECT_EQ(settle(request, 4 * kSectorBytes + 1), Next::finished);
    EXPECT_EQ(request.error, EIO);
}

// The best engine is made and one line says which. Method: read the log.
TEST(MakeIoEngine, OneLineSaysWhatWasChosen) {
    LogCapture log(LogLevel::info);
    const auto engine = make_io_engine(IoEngineKind::automatic, 16);
    EXPECT_EQ(engine->capacity(), 16u);
    const std::string lines = log.lines();
    EXPECT_EQ(std::ranges::count(lines, '\n'), 1);
    EXPECT_NE(lines.find("I/O engine: " + engine->name()), std::string::npos);
    if (engine->name() != "io_uring with fixed buffers") {
        EXPECT_NE(lines.find("no io_uring with fixed buffers: "), std::string::npos);
    }
}

// Where io_uring cannot be had, threads serve, the line says why, and a named kind throws. Method: a thread for which
// the system call is refused, as in a container (EPERM) and on a system without it (ENOSYS).
TEST(MakeIoEngine, FallsBackToThreads) {
    for (const int error : {EPERM, ENOSYS}) {
        LogCapture log(LogLevel::warning);
        std::string name = "none";
        in_own_thread([&] {
            if (!refuse_system_call({.number = __NR_io_uring_setup, .error = error})) return;
            name = make_io_engine(IoEngineKind::automatic, 4)->name();
            EXPECT_THROW(make_io_engine(IoEngineKind::uring, 4), InvalidArgument);
            EXPECT_THROW(make_io_engine(IoEngineKind::uring_fixed, 4), InvalidArgument);
        });
        if (name == "none") GTEST_SKIP() << "no seccomp here";
        EXPECT_EQ(name, "threads");
        EXPECT_NE(log.lines().find("no io_uring with fixed buffers: "), std::string::npos) << log.lines();
        EXPECT_NE(log.lines().find("no io_uring: "), std::string::npos) << log.lines();
    }
}

// Where only registration is refused, plain io_uring serves. Method: a thread for which registering a buffer table,
// then updating one, fails.
TEST(MakeIoEngine, FallsBackToPlainUring) {
    try {
        make_io_engine(IoEngineKind::uring_fixed, 4);
    } catch (const InvalidArgument& reason) {
        GTEST_SKIP() << reason.what();
    }
    constexpr std::uint32_t kRegisterBuffers2 = 15;  // of linux/io_uring.h, which only one source includes
    constexpr std::uint32_t kRegisterBuffersUpdate = 16;
    for (const std::uint32_t operation : {kRegisterBuffers2, kRegisterBuffersUpdate}) {
        LogCapture log(LogLevel::info);
        std::string name = "none";
        in_own_thread([&] {
            if (!refuse_system_call({__NR_io_uring_register, ENOMEM, 1, ~std::uint32_t{0}, operation})) return;
            name = make_io_engine(IoEngineKind::automatic, 4)->name();
        });
        if (name == "none") GTEST_SKIP() << "no seccomp here";
        EXPECT_EQ(name, "io_uring") << log.lines();
        EXPECT_NE(log.lines().find("no io_uring with fixed buffers: "), std::string::npos) << log.lines();
    }
}

}  // namespace
}  // namespace torch_offload::test
