// The Nth call of an I/O engine, or the Nth transfer, fails in one of the ways there are: the training meets typed
// errors at most, and is exact once the fault is over.
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "base/units.h"
#include "fault/case_runner.h"
#include "fault/fault_engine.h"
#include "fault/injector.h"
#include "fault/nth.h"
#include "fault/training_case.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

const FaultAnswer kErrors[] = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC},         {"EDQUOT", EDQUOT},      {"ENOMEM", ENOMEM},
    {"EAGAIN", EAGAIN}, {"EINTR", EINTR},           {"EBADR", EBADR},        {"ECANCELED", ECANCELED},
    {"EPERM", EPERM},   {"EOPNOTSUPP", EOPNOTSUPP}, {"ETIMEDOUT", ETIMEDOUT}};
const FaultAnswer kOfTransfersOnly[] = {{.name = "one byte", .most_bytes = 1},
                                        {.name = "half", .most_bytes = 2 * kSectorBytes},
                                        {.name = "never", .never = true}};
constexpr std::uint64_t kMostInterrupted = 100;  // calls in a row that a signal interrupts

/// One way to fail, for one kind of call.
struct Way {
    FaultCall call = FaultCall::read;
    FaultAnswer answer;
    std::uint64_t count = 1;   // in a row
    std::uint64_t usual = 12;  // numbers that are tried
};

bool is_passing(const FaultAnswer& answer) { return answer.error == EAGAIN || answer.error == EINTR; }

std::vector<Way> ways() {
    std::vector<Way> all;
    for (const std::uint64_t count : {std::uint64_t{1}, kForever}) {
        for (const FaultCall call : {FaultCall::read, FaultCall::write}) {
            for (const FaultAnswer& answer : kErrors) all.push_back({call, answer, count, 40});
            for (const FaultAnswer& answer : kOfTransfersOnly) all.push_back({call, answer, count, 40});
        }
        for (const FaultCall call : {FaultCall::submit, FaultCall::reap}) {
            for (const FaultAnswer& answer : kErrors) {
                const bool is_hung = count == kForever && is_passing(answer);  // nothing is taken, or given back
                all.push_back({call, answer, count, std::uint64_t{is_hung ? 2u : 22u}});
            }
        }
        all.push_back({FaultCall::register_buffer, {"refused"}, count, 12});
        all.push_back({FaultCall::unregister_buffer, {"bad_alloc"}, count, 2});
        for (const FaultAnswer& answer : kErrors) {
            all.push_back({FaultCall::fallocate, answer, is_passing(answer) ? kMostInterrupted : count, 4});
        }
    }
    return all;
}

TrainingCase training(Tiers tiers, std::uint64_t seed, const Fault& fault, const FaultAnswer& answer) {
    TrainingCase trained;
    trained.tiers = tiers;
    trained.seed = seed;
    trained.make_engine = [answer, seed] { return failing_engine(answer, seed); };
    trained.begin_fault = [fault, answer] {
        fail_system_calls_with(answer.error);
        arm(fault);
    };
    trained.end_fault = [] { disarm(); };
    trained.begins_with_the_pager = fault.call == FaultCall::fallocate;
    return trained;
}

// Method: each call of an engine, each transfer and each growth of the scratch file x each way to fail x N, once and
// from then on, over two and three tiers.
TEST(Fault, NthIo) {
    CaseRunner runner(2);
    std::uint64_t first_seed = base_seed();
    for (const Tiers tiers : {Tiers::two, Tiers::three}) {
        for (const Way& way : ways()) {
            first_seed += kSeedsOfASweep;
            const auto run = [&](std::uint64_t number) {
                const Fault fault{way.call, number, way.count};
                const std::uint64_t seed = first_seed + number;
                const std::string name = concat(tiers == Tiers::two ? "two" : "three", " tiers, ", name_of(way.call),
                                                " ", number, way.count == 1 ? "" : " on", ", ", way.answer.name);
                return runner.run(name, [&](Report& report) {
                    train(training(tiers, seed, fault, way.answer), report);
                    report.injected = injected_faults();
                });
            };
            try_numbers(run, way.usual);
        }
    }
    runner.finish(2400);
}

}  // namespace
}  // namespace torch_offload::test
