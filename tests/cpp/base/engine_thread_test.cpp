#include "base/engine_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "support/refuse_system_call.h"
#include "support/sanitized.h"

namespace torch_offload::test {
namespace {

// A thread has its name, takes no signals of the program's, and ends with its body.
TEST(EngineThread, RunsItsBodyUnderItsName) {
    std::string name(16, '\0');
    sigset_t blocked{};
    std::thread thread = engine_thread("to-test", [&] {
        pthread_getname_np(pthread_self(), name.data(), name.size());
        pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    });
    thread.join();
    EXPECT_STREQ(name.c_str(), "to-test");
    EXPECT_TRUE(sigismember(&blocked, SIGINT));
    EXPECT_TRUE(sigismember(&blocked, SIGUSR1));
    EXPECT_FALSE(sigismember(&blocked, SIGSEGV));
}

/// Exits with 0 if a thread that the system starts, and that finds no memory, is a typed error. Method: the stack is
/// one that is kept of an earlier thread, which took nothing else, and no other memory can be mapped.
[[noreturn]] void start_without_memory() {
    pthread_t earlier{};
    if (::pthread_create(&earlier, nullptr, [](void*) -> void* { return nullptr; }, nullptr) != 0) std::_Exit(2);
    ::pthread_join(earlier, nullptr);
    std::atomic<bool> has_run{false};
    if (!refuse_system_call({.number = __NR_mmap, .error = ENOMEM})) std::_Exit(3);
    try {
        engine_thread("to-test", [&] { has_run = true; }).join();
    } catch (const OffloadError& error) {
        const bool is_said = std::string(error.what()).find("there is no memory for it") != std::string::npos;
        std::_Exit(is_said && !has_run ? 0 : 4);
    }
    std::_Exit(5);
}

// It would end the process otherwise: "cannot allocate memory for thread-local data".
TEST(EngineThread, WithoutMemoryIsAnErrorOfWhoStartsIt) {
    if (kSanitized) GTEST_SKIP() << "a sanitizer's memory comes from elsewhere";
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a new process: a fork has the heaps of threads that ended
    EXPECT_EXIT(start_without_memory(), testing::ExitedWithCode(0), "^$");
}

}  // namespace
}  // namespace torch_offload::test
