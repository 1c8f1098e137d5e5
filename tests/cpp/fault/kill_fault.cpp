// A process that is killed leaves nothing in the scratch directory, and one that starts again there is exact.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <random>
#include <string>

#include "fault/case_runner.h"
#include "fault/training_case.h"
#include "support/pager_fixture.h"
#include "support/scratch_directory.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr int kKillsOfACase = 15;
constexpr int kSteps = 3;
constexpr std::uint64_t kLongestMicroseconds = 40'000;  // until it is killed: about what such a training takes
constexpr int kWasInexact = 1;

/// A training from start to end over a real file. Returns whether all of it was exact.
bool train_in(const std::string& directory, std::uint64_t seed) {
    PagerOptions options = small_options();
    options.directories = {directory};
    options.transfer_limits = TransferLimits{};
    TrainingTiers tiers(Tiers::two, options, make_io_engine(IoEngineKind::automatic, 8));
    SmallTraining training(tiers.top(), seed, 4, 2);
    std::size_t different = 0;
    for (int i = 0; i < kSteps; ++i) different += training.step();
    return different + training.differences() == 0;
}

pid_t start(const std::string& directory, std::uint64_t seed) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    int status = kWasInexact;
    try {
        status = train_in(directory, seed) ? 0 : kWasInexact;
    } catch (const std::exception&) {  // the status says it
    }
    ::_exit(status);
}

int wait_for(pid_t child) {
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

void kill_and_start_again(Report& report, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const ScratchDirectory scratch;
    for (int i = 0; i < kKillsOfACase; ++i) {
        const pid_t child = start(scratch.path(), seed + i);
        ::usleep(static_cast<useconds_t>(random() % kLongestMicroseconds));
        ::kill(child, SIGKILL);
        const int status = wait_for(child);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
            ++report.injected;
        } else if (status != 0) {
            report.fail(Verdict::wrong, "a training that ended before it was killed was not exact");
        }
        if (!scratch.is_empty()) report.fail(Verdict::leaked, "a killed process left something in its directory");
    }
    if (wait_for(start(scratch.path(), seed)) != 0) {
        report.fail(Verdict::wrong, "a training that starts again is not exact");
    }
}

// Method: trainings over a real file that are killed after a random time, one after the other in one directory, and one
// that is not.
TEST(Fault, Kill) {
    CaseRunner runner(20);
    const std::uint64_t cases = how_many(108, 3600);
    for (std::uint64_t i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + i * kKillsOfACase;
        runner.run(concat("kills, seed ", seed), [&](Report& report) { kill_and_start_again(report, seed); });
    }
    runner.finish(cases, 1500);
}

}  // namespace
}  // namespace torch_offload::test
