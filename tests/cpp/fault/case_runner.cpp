#include "fault/case_runner.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <typeinfo>

#include "base/check.h"
#include "base/log.h"
#include "fault/transitions.h"

namespace torch_offload::test {
namespace {

constexpr double kSlowSeconds = 1;
constexpr std::uint64_t kMostShown = 2;  // failures of one kind that are shown with their names

/// In production somebody reads the log, so lines are put together here as well.
void drop_line(LogLevel, const std::string&) {}

void run_body(const std::function<void(Report&)>& body, Report& report) {
    set_log_sink(&drop_line, LogLevel::warning);
    note_site_in(&report.site);
    try {
        body(report);
    } catch (const std::exception& error) {
        report.fail(Verdict::untyped, concat("escaped: ", typeid(error).name(), ": ", error.what()));
    }
    if (report.has_failed()) return;
    if (report.injected == 0) {
        report.verdict = Verdict::unreached;
    } else if (report.verdict != Verdict::lost && report.raised > 0) {
        report.verdict = Verdict::typed;
    }
}

const char* wanted_case() { return std::getenv("OFFLOAD_FAULT_CASE"); }

}  // namespace

const char* name_of(Verdict verdict) noexcept {
    constexpr std::array<const char*, kVerdictCount> kNames = {"exact",   "typed", "lost",   "unreached", "wrong",
                                                               "untyped", "stuck", "leaked", "crashed",   "hung"};
    return kNames[static_cast<std::size_t>(verdict)];
}

void Report::fail(Verdict defect, const std::string& why) noexcept {
    if (has_failed()) return;
    verdict = defect;
    note(why);
}

void Report::note(const std::string& what) noexcept {
    const std::size_t size = std::min(what.size(), text.size() - 1);
    std::memcpy(text.data(), what.data(), size);
    text[size] = '\0';
}

CaseRunner::CaseRunner(unsigned hang_seconds) : hang_seconds_(hang_seconds) {
    void* const shared = ::mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) throw std::runtime_error("no memory to share with the cases");
    report_ = new (shared) Report;
    forget_transitions();
}

CaseRunner::~CaseRunner() { ::munmap(report_, sizeof(Report)); }

Verdict CaseRunner::run(const std::string& name, const std::function<void(Report&)>& body) {
    if (wanted_case() && name.find(wanted_case()) == std::string::npos) return Verdict::exact;
    const auto begin = std::chrono::steady_clock::now();
    const Verdict verdict = run_in_child(name, body);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    slowest_seconds_ = std::max(slowest_seconds_, took.count());
    if (took.count() > kSlowSeconds)
        std::cout << name << ": " << name_of(verdict) << " after " << took.count() << " s" << std::endl;
    ++ran_;
    ++counts_[static_cast<std::size_t>(verdict)];
    injected_ += report_->injected;
    raised_ += report_->raised;
    return verdict;
}

Verdict CaseRunner::run_in_child(const std::string& name, const std::function<void(Report&)>& body) {
    *report_ = Report{};
    if (wanted_case()) {
        run_body(body, *report_);
        if (report_->has_failed()) add_failure(name, report_->verdict, report_->text.data());
        return report_->verdict;
    }
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error(concat("fork: ", std::strerror(errno)));
    if (child == 0) {
        ::alarm(hang_seconds_);
        run_body(body, *report_);
        ::_exit(0);
    }
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) {
        const bool is_hung = WTERMSIG(status) == SIGALRM;
        const Verdict verdict = is_hung ? Verdict::hung : Verdict::crashed;
        add_failure(name, verdict, concat(::strsignal(WTERMSIG(status)), "; ", report_->text.data()));
        return verdict;
    }
    if (report_->has_failed()) add_failure(name, report_->verdict, report_->text.data());
    return report_->verdict;
}

void CaseRunner::add_failure(const std::string& name, Verdict verdict, const std::string& why) {
    const std::string site = describe(report_->site);
    const std::string what = concat(name_of(verdict), site.empty() ? "" : ", fault in ", site);
    if (++defects_[what] <= kMostShown) ADD_FAILURE() << name << ": " << what << ": " << why;
}

void CaseRunner::finish(std::uint64_t least_cases, std::uint64_t least_faults) {
    testing::Test::RecordProperty("cases", std::to_string(ran_));
    testing::Test::RecordProperty("reached", std::to_string(reached()));
    testing::Test::RecordProperty("injected", std::to_string(injected_));
    testing::Test::RecordProperty("raised", std::to_string(raised_));
    for (std::size_t i = 0; i < kVerdictCount; ++i) {
        testing::Test::RecordProperty(name_of(static_cast<Verdict>(i)), std::to_string(counts_[i]));
    }
    testing::Test::RecordProperty("slowest_seconds", std::to_string(slowest_seconds_));
    testing::Test::RecordProperty("transitions", seen_transitions());
    std::string defects;
    for (const auto& [what, times] : defects_) defects += concat(defects.empty() ? "" : "; ", times, ' ', what);
    testing::Test::RecordProperty("defects", defects);
    for (const auto& [what, times] : defects_) {
        if (times > kMostShown) ADD_FAILURE() << times << " cases in all: " << what;
    }
    testing::Test::RecordProperty("illegal_transitions", illegal_transitions());
    EXPECT_EQ(illegal_transitions(), "") << "which the table of transitions.cpp does not have";
    if (wanted_case()) return;
    EXPECT_GE(reached(), least_cases) << "cases in which the fault came to pass";
    EXPECT_GE(injected_, least_faults) << "faults that came to pass";
}

std::uint64_t how_many(std::uint64_t usual, std::uint64_t full) {
    const char* const matrix = std::getenv("MATRIX");
    return matrix && std::strcmp(matrix, "full") == 0 ? full : usual;
}

}  // namespace torch_offload::test
