// A disk that hangs or is slow: who waits is told within the deadline and the log names what hangs; when the disk comes
// back, everything goes on and is exact. A disk that is only slow makes no errors.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>

#include "base/log.h"
#include "fault/case_runner.h"
#include "fault/fault_engine.h"
#include "fault/injector.h"
#include "fault/training_case.h"
#include "storage/throttled_engine.h"
#include "support/pager_fixture.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{1000};
constexpr milliseconds kWarnAfter{200};
constexpr milliseconds kLatest{2500};  // on a busy machine
constexpr double kSlowBytesPerSecond = 4e6;

std::atomic<int> lines_of_age{0};

void count_line(LogLevel, const std::string& line) { lines_of_age += line.find("has taken") != std::string::npos; }

TrainingCase with_deadlines(Tiers tiers) {
    TrainingCase trained;
    trained.tiers = tiers;
    trained.seed = base_seed();
    trained.steps = 1;
    trained.layers = 12;
    trained.options = [] {
        PagerOptions options = small_options();
        options.transfer_limits.warn_after = kWarnAfter;
        options.transfer_limits.timeout = kTimeout;
        return options;
    };
    return trained;
}

void train_on_hung_disk(Report& report, Tiers tiers, const Fault& fault) {
    set_log_sink(&count_line, LogLevel::warning);
    TrainingCase trained = with_deadlines(tiers);
    Clock::time_point begin;
    trained.make_engine = [] { return failing_engine({.name = "never", .never = true}, 1); };
    trained.begin_fault = [&] {
        begin = Clock::now();
        arm(fault);
    };
    Clock::duration took{};
    trained.end_fault = [&] {
        took = Clock::now() - begin;
        disarm();
    };
    train(trained, report);
    report.injected = injected_faults();
    if (report.has_failed()) return;
    if (report.raised == 0) report.fail(Verdict::untyped, "nobody was told that the disk hangs");
    if (took < kTimeout || took > kLatest) {
        report.fail(Verdict::hung, concat("the step ended after ", std::chrono::duration<double>(took).count(), " s"));
    }
    if (lines_of_age == 0) report.fail(Verdict::untyped, "the log does not say what hangs");
}

void train_on_slow_disk(Report& report, Tiers tiers) {
    set_log_sink(&count_line, LogLevel::warning);
    TrainingCase trained = with_deadlines(tiers);
    trained.make_engine = [] {
        return std::make_unique<ThrottledEngine>(std::make_unique<SimEngine>(8, 1), kSlowBytesPerSecond);
    };
    trained.begin_fault = [] {};
    trained.end_fault = [] {};
    train(trained, report);
    report.injected = 1;
    if (report.raised > 0) report.fail(Verdict::untyped, concat("an error, of a slow disk: ", report.text.data()));
}

/// The pager ends while a transfer does not.
void end_with_hung_disk(Report& report) {
    Pager pager(with_deadlines(Tiers::two).options(), failing_engine({.name = "never", .never = true}, 1));
    const auto segment = filled_segment(pager, 1, 1);
    arm({FaultCall::write, 1, kForever});
    returns(report, [&] { pager.evict(segment); });
    report.injected = injected_faults();
}

// Method: reads or writes that do not end, from the first or a later one on; a disk of 4 MB/s; the end of a pager.
TEST(Fault, HungDisk) {
    CaseRunner runner(6);
    for (const Tiers tiers : {Tiers::two, Tiers::three}) {
        const char* const which = tiers == Tiers::two ? "two" : "three";
        for (const FaultCall call : {FaultCall::read, FaultCall::write}) {
            for (const std::uint64_t number : {1u, 5u}) {
                runner.run(concat(which, " tiers, ", name_of(call), " ", number, " on hangs"),
                           [&](Report& report) { train_on_hung_disk(report, tiers, {call, number, kForever}); });
            }
        }
        runner.run(concat(which, " tiers, slow disk"), [&](Report& report) { train_on_slow_disk(report, tiers); });
    }
    runner.run("the pager ends", [](Report& report) { end_with_hung_disk(report); });
    runner.finish(11);
}

}  // namespace
}  // namespace torch_offload::test
