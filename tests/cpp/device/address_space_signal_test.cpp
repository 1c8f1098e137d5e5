#include "device/address_space.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "support/address_space_fixture.h"
#include "support/sanitized.h"

namespace torch_offload::test {
namespace {

/// A page outside the arena that nobody may read.
std::byte* foreign_page() {
    void* page = mmap(nullptr, kSectorBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return static_cast<std::byte*>(page);
}

void say(const char* text) { [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text)); }

void install(void (*handler)(int, siginfo_t*, void*), int flags) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    sigaction(SIGSEGV, &action, nullptr);
}

struct sigaction displaced_action;

/// Like faulthandler: says its word, puts back what it displaced and raises again.
void raise_again(int signal, siginfo_t*, void*) {
    say("displacer;");
    sigaction(SIGSEGV, &displaced_action, nullptr);
    raise(signal);
}

void install_displacer(int flags) {
    sigaction(SIGSEGV, nullptr, &displaced_action);
    install(raise_again, flags);
}

using AddressSpaceSignal = testing::Test;

// A fault that is nobody's ends the process as ever. Method: children that touch foreign memory, an untargeted range,
// the padding behind a range; and one that raises the signal.
TEST(AddressSpaceSignal, ForeignFaultKills) {
    ScriptedTarget target([] { say("answered;"); });
    const Range untargeted(kSectorBytes);
    const Range targeted(kSectorBytes, &target);
    EXPECT_EXIT(load(foreign_page()), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(load(untargeted.begin()), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(load(targeted.begin() + kSectorBytes), testing::KilledBySignal(SIGSEGV), "^$");
    EXPECT_EXIT(raise(SIGSEGV), testing::KilledBySignal(SIGSEGV), "^$");
}

// A handler that displaced ours is noticed, chained and gets what is not ours; ours is back. Method: in a child.
TEST(AddressSpaceSignal, DisplacerIsChained) {
    const auto child = [] {
        install(
            [](int, siginfo_t* info, void*) {
                say(info->si_code == SEGV_ACCERR ? "displacer got a protection fault;"
                                                 : "displacer got something else;");
                _exit(7);
            },
            0);
        if (!space().ensure_handler_installed()) say("not noticed;");
        if (space().ensure_handler_installed()) say("not back;");
        load(foreign_page());
    };
    EXPECT_FALSE(space().ensure_handler_installed());
    EXPECT_EXIT(child(), testing::ExitedWithCode(7), "^displacer got a protection fault;$");
}

// A plain sa_handler is called too, and one with SA_RESETHAND once. Method: a handler that returns; the second fault
// takes the default action.
TEST(AddressSpaceSignal, OneShotHandlerIsCalledOnce) {
    const auto child = [] {
        struct sigaction action = {};
        action.sa_handler = [](int) { say("once;"); };
        action.sa_flags = static_cast<int>(SA_RESETHAND);
        sigaction(SIGSEGV, &action, nullptr);
        space().ensure_handler_installed();
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^once;$");
}

// SIG_IGN ignores a sent signal and nothing else, as the kernel does. Method: raise, then a fault, in a child.
TEST(AddressSpaceSignal, IgnoredSignalStillKillsOnFault) {
    const auto child = [] {
        signal(SIGSEGV, SIG_IGN);
        space().ensure_handler_installed();
        raise(SIGSEGV);
        say("ignored;");
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^ignored;$");
}

// A displacer that raises again to reach what it displaced does not loop through us. Method: with and without
// SA_NODEFER, as faulthandler and as others do it.
TEST(AddressSpaceSignal, DisplacerThatRaisesAgainEnds) {
    for (const int flags : {SA_NODEFER, 0}) {
        const auto child = [flags] {
            install_displacer(flags);
            space().ensure_handler_installed();
            load(foreign_page());
        };
        EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^displacer;$");
    }
}

// A previous handler that does nothing cannot hang the process. Method: one that returns, as a disabled faulthandler.
TEST(AddressSpaceSignal, HandlerWithoutEffectEndsInTheDefault) {
    const auto child = [] {
        install([](int, siginfo_t*, void*) {}, SA_NODEFER);
        space().ensure_handler_installed();
        load(foreign_page());
    };
    EXPECT_EXIT(child(), testing::KilledBySignal(SIGSEGV), "^$");
}

// A forked child does not have hidden memory and is told so. Method: touch it in a child, before and after a move.
TEST(AddressSpaceFork, HiddenMemoryIsAbsentAndExplained) {
    ScriptedTarget target([] {});
    const Range slot(kFrameBytes, &target);
    const Range segment(kFrameBytes, &target);
    space().commit(slot.bytes());
    space().hide_from_fork(slot.bytes(), true);
    fill(slot.bytes(), 1);
    EXPECT_EXIT(load(slot.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor.*spawn");
    space().move(slot.bytes(), segment.begin(), Protection::read_write);
    EXPECT_EXIT(load(segment.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
    EXPECT_EXIT(load(slot.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
}

// Being hidden is a property of the memory, not of the address. Method: shown memory moves onto hidden addresses and is
// there in a child; hidden memory moves onto shown addresses and is not.
TEST(AddressSpaceFork, HiddenTravelsWithTheMemory) {
    ScriptedTarget target([] {});
    const Range shown(kFrameBytes, &target);
    const Range hidden(kFrameBytes, &target);
    const Range elsewhere(kFrameBytes, &target);
    space().commit(shown.bytes());
    space().commit(hidden.bytes());
    space().hide_from_fork(hidden.bytes(), true);
    store(shown.begin(), std::byte{8});
    space().move(hidden.bytes(), elsewhere.begin(), Protection::read);
    space().move(shown.bytes(), hidden.begin(), Protection::read);
    EXPECT_EXIT(_exit(static_cast<int>(load(hidden.begin()))), testing::ExitedWithCode(8), "^$");
    space().move(elsewhere.bytes(), shown.begin(), Protection::read);
    EXPECT_EXIT(load(shown.begin()), testing::KilledBySignal(SIGSEGV), "a forked child touched a managed tensor");
}

// Memory that is not hidden means in a child what it always meant. Method: shown, hidden and shown again; committed
// anew after being hidden.
TEST(AddressSpaceFork, ShownMemoryIsTheChildsCopy) {
    ScriptedTarget target([] {});
    const Range range(kFrameBytes, &target);
    space().commit(range.bytes());
    store(range.begin(), std::byte{9});
    const auto child = [&] { _exit(static_cast<int>(load(range.begin()))); };
    EXPECT_EXIT(child(), testing::ExitedWithCode(9), "^$");
    space().hide_from_fork(range.bytes(), true);
    space().hide_from_fork(range.bytes(), false);
    EXPECT_EXIT(child(), testing::ExitedWithCode(9), "^$");
    space().hide_from_fork(range.bytes(), true);
    space().decommit(range.bytes());
    space().commit(range.bytes());
    EXPECT_EXIT(child(), testing::ExitedWithCode(0), "^$");
}

// A child can reserve and commit ranges of its own whatever the parent's threads were doing. Method: fork while two
// threads reserve and release without end.
TEST(AddressSpaceFork, ChildIsNotLeftWithALockedArena) {
    std::atomic<bool> done{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            while (!done) const Range range(kSectorBytes);
        });
    }
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            const Range range(kFrameBytes);
            space().commit(range.bytes());
            store(range.begin(), std::byte{5});
            _exit(static_cast<int>(load(range.begin())));
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 5);
    }
    done = true;
    for (std::thread& thread : threads) thread.join();
}

// Too many mappings is a typed error that names the limit, and the memory whose move met it can be opened again.
// Method: in a child, commit every other sector until it fails, then move, twice. Each of these takes two mappings, so
// whether the last one is left depends on how many there were: both cases are tried. With fewer mappings moves work
// again.
TEST(AddressSpaceLimits, TooManyMappingsNameTheRemedy) {
    std::size_t limit = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> limit;
    if (kSanitized) GTEST_SKIP() << "a sanitizer needs mappings of its own";
    if (limit > 200000) GTEST_SKIP() << "vm.max_map_count is " << limit << ": it would take too long to reach";
    const auto child = [limit](std::size_t used_before) {
        const Range before((used_before + 2) * kSectorBytes);
        for (std::size_t i = 1; i <= used_before; ++i) {  // side by side: one mapping more than there are
            const std::span<std::byte> sector = before.bytes().subspan(i * kSectorBytes, kSectorBytes);
            space().commit(sector);
            space().protect(sector, i % 2 == 0 ? Protection::read : Protection::read_write);
        }
        // Between uncommitted sectors: beside a committed one it would be part of its mapping, and need another.
        const Range around_source(3 * kSectorBytes);
        const Range target(kSectorBytes);
        const Range many(2 * limit * kSectorBytes);
        const std::span<std::byte> source = around_source.bytes().subspan(kSectorBytes, kSectorBytes);
        space().commit(source);
        store(source.data(), std::byte{3});
        std::string message;
        try {
            for (std::size_t i = 0; i < 2 * limit; i += 2)
                space().commit(many.bytes().subspan(i * kSectorBytes, kSectorBytes));
        } catch (const OutOfTierMemory& error) {
            message = error.what();
        }
        if (message.find("sysctl -w vm.max_map_count=") == std::string::npos) _exit(1);
        for (int attempt = 0; attempt < 2; ++attempt) {
            try {
                space().move(source, target.begin(), Protection::read);
                _exit(2);
            } catch (const OutOfTierMemory&) {
                space().protect(source, Protection::read);
            }
            if (is_readable(target.begin()) || load(source.data()) != std::byte{3}) _exit(3);
        }
        space().decommit(many.bytes());
        space().move(source, target.begin(), Protection::read);
        _exit(static_cast<int>(load(target.begin())) + 40);
    };
    for (const std::size_t used_before : {1, 2, 3, 4}) {
        EXPECT_EXIT(child(used_before), testing::ExitedWithCode(43), "^$") << used_before << " sectors before";
    }
}

}  // namespace
}  // namespace torch_offload::test
