#include "storage/thread_engine.h"

#include "conformance/io_engine_contract.h"

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

// A capacity of nothing is refused. Method: construct.
TEST(ThreadEngine, RefusesZeroCapacity) { EXPECT_THROW(ThreadEngine(0), InvalidArgument); }

}  // namespace
}  // namespace torch_offload::test
