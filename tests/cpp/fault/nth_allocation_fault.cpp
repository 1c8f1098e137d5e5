// The Nth allocation of a thread fails: the program meets bad_alloc or a typed error at most, no thread of the engine
// ends, no page is stuck, nothing leaks, and the training is exact once there is memory again.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "fault/case_runner.h"
#include "fault/fault_engine.h"
#include "fault/injector.h"
#include "fault/nth.h"
#include "fault/training_case.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

TrainingCase training(Tiers tiers, std::uint64_t seed, const Fault& fault) {
    TrainingCase trained;
    trained.tiers = tiers;
    trained.seed = seed;
    trained.make_engine = [seed] {
        const Spared own;
        return failing_engine({}, seed);
    };
    trained.begin_fault = [fault] { arm(fault); };
    trained.end_fault = [] { disarm(); };
    trained.begins_with_the_pager = fault.thread == FaultThread::program;
    return trained;
}

/// Blocks that are alive after a training, as a case ends.
void count_blocks(Report& report, const TrainingCase& trained) {
    const std::int64_t before = live_blocks();
    train(trained, report);
    report.left_blocks = live_blocks() - before;
    report.injected = injected_faults();
}

// Method: each thread x N, once and three times in a row, over two and three tiers; blocks that are alive at the end
// are those of a training without a fault.
TEST(Fault, NthAllocation) {
    CaseRunner runner(2);
    for (const Tiers tiers : {Tiers::two, Tiers::three}) {
        const char* const which = tiers == Tiers::two ? "two" : "three";
        const auto run = [&](const Fault& fault, std::int64_t usual_blocks) {
            const std::string name = concat(which, " tiers, allocation ", fault.first, fault.count == 1 ? "" : " to ",
                                            fault.count == 1 ? "" : std::to_string(fault.first + fault.count - 1),
                                            " of ", name_of(fault.thread));
            return runner.run(name, [&](Report& report) {
                count_blocks(report, training(tiers, base_seed(), fault));
                if (report.left_blocks > usual_blocks)
                    report.fail(Verdict::leaked, concat(report.left_blocks - usual_blocks, " blocks of memory leaked"));
            });
        };
        run({FaultCall::allocation, kForever}, INT64_MAX);
        const std::int64_t usual_blocks = runner.last().left_blocks;
        for (const std::uint64_t count : {1u, 3u}) {
            for (const FaultThread thread : {FaultThread::program, FaultThread::ssd, FaultThread::service,
                                             FaultThread::to_device, FaultThread::to_host, FaultThread::planner}) {
                const auto run_nth = [&](std::uint64_t number) {
                    return run({FaultCall::allocation, number, count, thread}, usual_blocks);
                };
                if (tiers == Tiers::three || thread <= FaultThread::service) try_numbers(run_nth, 100);
            }
        }
    }
    runner.finish(600);
}

}  // namespace
}  // namespace torch_offload::test
