#include "storage/io_engine.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "base/check.h"
#include "base/units.h"
#include "support/aligned_buffer.h"
#include "support/log_capture.h"

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

// Interruptions and shortness end in EIO after kMaxRounds. Method: nothing but EINTR, EAGAIN and single bytes.
TEST_F(Settle, RoundsAreBounded) {
    for (const std::int64_t result : {std::int64_t{-EINTR}, std::int64_t{-EAGAIN}, std::int64_t{1}}) {
        start_over(request);
        std::uint32_t count = 1;
        while (settle(request, result) == Next::resubmit) ASSERT_LT(++count, 2 * kMaxRounds);
        EXPECT_EQ(count, kMaxRounds);
        EXPECT_EQ(request.error, EIO);
    }
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

/// Makes this thread's system call `number` fail with `error`, as a container's seccomp profile does; with `operation`
/// not negative, only where its second argument is that. False where the system does not let it.
bool refuse_system_call(std::uint32_t number, std::int64_t operation, std::uint32_t error) {
    const bool any_operation = operation < 0;
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | (any_operation ? BPF_JGE : BPF_JEQ) | BPF_K,
                 any_operation ? 0 : static_cast<std::uint32_t>(operation), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{std::size(program), program};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Where io_uring cannot be had, threads serve, the line says why, and a named kind throws. Method: a thread for which
// the system call is refused, as in a container (EPERM) and on a system without it (ENOSYS).
TEST(MakeIoEngine, FallsBackToThreads) {
    for (const int error : {EPERM, ENOSYS}) {
        LogCapture log(LogLevel::info);
        std::string name = "none";
        std::thread([&] {
            if (!refuse_system_call(__NR_io_uring_setup, -1, static_cast<std::uint32_t>(error))) return;
            name = make_io_engine(IoEngineKind::automatic, 4)->name();
            EXPECT_THROW(make_io_engine(IoEngineKind::uring, 4), InvalidArgument);
            EXPECT_THROW(make_io_engine(IoEngineKind::uring_fixed, 4), InvalidArgument);
        }).join();
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
    constexpr int kRegisterBuffers2 = 15;  // of linux/io_uring.h, which only one source includes
    constexpr int kRegisterBuffersUpdate = 16;
    for (const int operation : {kRegisterBuffers2, kRegisterBuffersUpdate}) {
        LogCapture log(LogLevel::info);
        std::string name = "none";
        std::thread([&] {
            if (!refuse_system_call(__NR_io_uring_register, operation, ENOMEM)) return;
            name = make_io_engine(IoEngineKind::automatic, 4)->name();
        }).join();
        if (name == "none") GTEST_SKIP() << "no seccomp here";
        EXPECT_EQ(name, "io_uring") << log.lines();
        EXPECT_NE(log.lines().find("no io_uring with fixed buffers: "), std::string::npos) << log.lines();
    }
}

}  // namespace
}  // namespace torch_offload::test
