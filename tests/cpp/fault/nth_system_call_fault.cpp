// The Nth system call of a kind fails, from the pager's making on: a typed error at most, nothing left open or mapped
// to somebody else, and the training is exact once calls succeed again.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "fault/case_runner.h"
#include "fault/fault_engine.h"
#include "fault/injector.h"
#include "fault/nth.h"
#include "fault/training_case.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr std::uint64_t kMostInterrupted = 100;

/// Whose calls they are: of everything above the engine, or of an engine over a real file.
enum class Disk : std::uint8_t { simulated, real };

struct Refused {
    FaultCall call = FaultCall::mmap;
    std::vector<int> errors;
    std::uint64_t usual = 8;  // numbers that are tried
    Disk disk = Disk::simulated;
    Lacking lacking = Lacking::nothing;
};

const std::vector<Refused>& refused_calls() {
    static const std::vector<Refused> calls = {
        {FaultCall::mmap, {ENOMEM, EAGAIN}, 30},
        {FaultCall::mremap, {ENOMEM, EAGAIN}, 40},
        {FaultCall::mprotect, {ENOMEM}, 60},
        {FaultCall::madvise, {ENOMEM, EAGAIN}, 30},
        {FaultCall::munmap, {ENOMEM, EINVAL}},
        {FaultCall::fallocate, {ENOSPC, EDQUOT, EIO, EFBIG, EPERM, EOPNOTSUPP, EINTR}},
        {FaultCall::ftruncate, {EIO, EFBIG, EINVAL, EPERM}, 8, Disk::simulated, Lacking::preallocation},
        {FaultCall::fcntl, {EINVAL, EPERM}},
        {FaultCall::open, {EMFILE, ENFILE, EACCES, EROFS, ENOSPC, EOPNOTSUPP, EISDIR, EINTR}},
        {FaultCall::mkostemp, {EMFILE, EACCES, ENOSPC}, 8, Disk::simulated, Lacking::nameless_files},
        {FaultCall::unlink, {EACCES, EIO, EROFS}, 8, Disk::simulated, Lacking::nameless_files},
        {FaultCall::eventfd, {EMFILE, ENFILE, ENOMEM}, 8, Disk::real},
        {FaultCall::pipe2, {EMFILE, ENFILE}, 8, Disk::real},
        {FaultCall::fcntl, {EINVAL, EPERM}, 8, Disk::real},
        {FaultCall::mmap, {ENOMEM}, 12, Disk::real},
    };
    return calls;
}

TrainingCase training(Tiers tiers, std::uint64_t seed, const Refused& refused, int error, const Fault& fault) {
    TrainingCase trained;
    trained.tiers = tiers;
    trained.seed = seed;
    trained.make_engine = [disk = refused.disk, seed = trained.seed]() -> std::unique_ptr<IoEngine> {
        if (disk == Disk::real) return make_io_engine(IoEngineKind::automatic, 8);
        const Spared own;
        return failing_engine({}, seed);
    };
    if (refused.disk == Disk::real) {
        trained.options = [] {
            PagerOptions options = small_options();
            options.transfer_limits.timeout = std::chrono::seconds(1);  // a real disk may be busy with other cases
            return options;
        };
    }
    trained.begin_fault = [fault, error, lacking = refused.lacking] {
        let_filesystem_lack(lacking);
        fail_system_calls_with(error);
        arm(fault);
    };
    trained.end_fault = [] { disarm(); };
    trained.begins_with_the_pager = true;
    // Nothing that the kernel does: what was hidden for a move takes no mapping to open. Then bytes have no address.
    trained.may_lose = fault.call == FaultCall::mprotect && fault.count != 1;
    return trained;
}

// Method: each call x errno x N, once and from then on, over two and three tiers.
TEST(Fault, NthSystemCall) {
    CaseRunner runner;
    std::uint64_t first_seed = base_seed();
    for (const Tiers tiers : {Tiers::two, Tiers::three}) {
        for (const Refused& refused : refused_calls()) {
            for (const int error : refused.errors) {
                for (const std::uint64_t count : {std::uint64_t{1}, error == EINTR ? kMostInterrupted : kForever}) {
                    first_seed += kSeedsOfASweep;
                    const auto run = [&](std::uint64_t number) {
                        const std::string name =
                            concat(tiers == Tiers::two ? "two" : "three", " tiers, ", name_of(refused.call), " ",
                                   number, count == 1 ? "" : " on", ", ", ::strerrorname_np(error),
                                   refused.disk == Disk::real ? ", real disk" : "");
                        return runner.run(name, [&](Report& report) {
                            const Fault fault{refused.call, number, count};
                            train(training(tiers, first_seed + number, refused, error, fault), report);
                            report.injected = injected_faults();
                        });
                    };
                    try_numbers(run, refused.usual);
                }
            }
        }
    }
    runner.finish(700);
}

}  // namespace
}  // namespace torch_offload::test
