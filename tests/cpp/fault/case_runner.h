// Runs cases in processes of their own, so that one that crashes or hangs is counted and named, and the rest go on.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "fault/injector.h"

namespace torch_offload::test {

/// How a case ended. All behind `unreached` are defects.
enum class Verdict : std::uint8_t {
    exact,      // the program saw no error, and every byte is right
    typed,      // it saw typed errors, lost nothing, and went on exactly once the fault was over
    lost,       // the same, but bytes were lost: it was told so whenever it asked for them
    unreached,  // the fault did not come to pass
    wrong,      // bytes that are not what was written, and no error
    untyped,    // an error of another type, or a LogicError
    stuck,      // it did not recover: pages in between, accounts that are not zero
    leaked,     // descriptors, threads or memory left
    crashed,
    hung,
};
inline constexpr std::size_t kVerdictCount = 10;
const char* name_of(Verdict verdict) noexcept;

/// What a case says of itself. Lies in memory that its process shares with the runner.
struct Report {
    Verdict verdict = Verdict::exact;
    std::uint64_t injected = 0;    // faults that came to pass
    std::uint64_t raised = 0;      // typed errors that the program saw
    bool has_lost = false;         // the last of them said that bytes are lost
    std::int64_t left_blocks = 0;  // of memory, when all is gone: statics and what leaks
    std::array<char, 600> text{};
    FaultSite site;

    bool has_failed() const noexcept { return verdict > Verdict::unreached; }
    /// The first defect counts.
    void fail(Verdict defect, const std::string& why) noexcept;
    void note(const std::string& what) noexcept;
};

/// One harness: its cases, counted by how they ended. Failures of the test are added as they are found, with the name
/// of the case. OFFLOAD_FAULT_CASE=part of a name runs only such cases, in this process, for a debugger.
class CaseRunner {
public:
    /// A case that takes longer than `hang_seconds` is hung.
    explicit CaseRunner(unsigned hang_seconds = 3);
    ~CaseRunner();
    CaseRunner(const CaseRunner&) = delete;
    CaseRunner& operator=(const CaseRunner&) = delete;

    /// Returns how it ended; one that was left out counts nowhere.
    Verdict run(const std::string& name, const std::function<void(Report&)>& body);
    /// What the process of the last case said, if it lived to say it.
    const Report& last() const noexcept { return *report_; }

    std::uint64_t count(Verdict verdict) const noexcept { return counts_[static_cast<std::size_t>(verdict)]; }
    /// Those in which the fault came to pass.
    std::uint64_t reached() const noexcept { return ran_ - count(Verdict::unreached); }

    /// Records the counts as properties of the test, with the state transitions seen. Fails it where fewer than `least`
    /// cases were reached or faults came to pass, or a page changed its state in a way that the table does not have.
    void finish(std::uint64_t least_cases, std::uint64_t least_faults = 0);

private:
    Verdict run_in_child(const std::string& name, const std::function<void(Report&)>& body);
    void add_failure(const std::string& name, Verdict verdict, const std::string& why);

    const unsigned hang_seconds_;
    Report* report_;
    std::array<std::uint64_t, kVerdictCount> counts_{};
    std::uint64_t ran_ = 0;
    std::uint64_t injected_ = 0;
    std::uint64_t raised_ = 0;
    double slowest_seconds_ = 0;
    std::map<std::string, std::uint64_t> defects_;  // by kind and place
};

/// As many as MATRIX=full asks for, or the usual.
std::uint64_t how_many(std::uint64_t usual, std::uint64_t full);

}  // namespace torch_offload::test
