// The driver itself, without torch: whether it keeps what csrc/device and csrc/pager rely on, and what its calls cost.
//   driver_program checks [DIRECTORY]    every contract, held or not; scratch files go to DIRECTORY (.), on a real disk
//   driver_program timings               medians, smallest and largest
//   driver_program unfenced [DIRECTORY]  the check of pages under kernels where nobody waits for these: has to fail
//   driver_program lost                  of `checks`: what is said once the device is lost, in a process of its own
// The last line of stdout is a JSON object; progress is on stderr. Exits with 1 if something does not hold, with 2 if
// it did not end in time. With REHEARSAL it is plain C++ over the fake driver: what is measured then means nothing.
#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <string>

#include "base/log.h"
#include "driver_checks.cuh"
#include "driver_machine.cuh"
#include "driver_report.h"
#include "driver_timings.cuh"

#if defined(REHEARSAL)
#include <gtest/gtest.h>
#endif

namespace torch_offload {
namespace {

constexpr std::chrono::seconds kLimit{Machine::kIsRehearsal ? 300 : 100};

/// Of this program.
std::string path_of_program() {
    std::array<char, 4096> path{};
    const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
    require(length > 0, "the program does not find itself");
    return {path.data(), static_cast<std::size_t>(length)};
}

void log_to_stderr(LogLevel, const std::string& line) { std::fprintf(stderr, "    log: %s\n", line.c_str()); }

void run(Report& report, const std::string& subcommand, const std::string& directory) {
    Machine machine(subcommand == "unfenced" ? Machine::Uses::end_with_guards : Machine::Uses::end_with_kernels);
    report.put("device", quoted(machine.context().name()));
    report.put("driver_version", std::to_string(machine.driver_version()));
    report.put("granule_bytes", std::to_string(machine.granule_bytes()));
    report.put("free_bytes", std::to_string(machine.free_bytes()));
    report.put("is_rehearsal", Machine::kIsRehearsal ? "true" : "false");
    if (subcommand == "timings") {
        timings::run_all(machine, report);
    } else if (subcommand == "lost") {
        report.check("a lost device is said", [&] { return checks::lost_device_is_said(machine); });
    } else if (subcommand == "unfenced") {
        report.check("pages hold counts where nobody waits for kernels",
                     [&] { return checks::pages_hold_counts_of_kernels(machine, directory); });
    } else {
        checks::run_all(machine, report, directory, path_of_program());
    }
}

/// What the fake saw that a driver would forgive or punish later.
int complaints_of_the_fake() {
#if defined(REHEARSAL)
    return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().total_part_count();
#else
    return 0;
#endif
}

int run_program(const std::string& subcommand, const std::string& directory) {
    set_log_sink(&log_to_stderr, LogLevel::info);
    Report report(subcommand, kLimit);
    try {
        run(report, subcommand, directory);
    } catch (const std::exception& error) {
        report.fail("the program", error.what());
    }
    if (const int count = complaints_of_the_fake(); count > 0) {
        report.fail("the fake driver", concat(count, " complaints, see above"));
    }
    report.print();
    return report.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) {
    const std::string subcommand = argument_count > 1 ? arguments[1] : "";
    constexpr std::array kSubcommands = {"checks", "timings", "unfenced", "lost"};
    if (std::ranges::find(kSubcommands, subcommand) == kSubcommands.end()) {
        std::fprintf(stderr, "driver_program checks [DIRECTORY] | timings | unfenced [DIRECTORY] | lost\n");
        return 64;
    }
    return torch_offload::run_program(subcommand, argument_count > 2 ? arguments[2] : ".");
}
