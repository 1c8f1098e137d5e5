#include "fault/injector.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string_view>
#include <tuple>

namespace torch_offload::test {
namespace {

struct Armed {
    std::atomic<bool> is_on{false};
    Fault fault;
    std::atomic<std::uint64_t> seen{0};
    std::atomic<std::uint64_t> injected{0};
};
Armed armed;
thread_local int spared_depth = 0;
FaultSite* noted_site = nullptr;
constexpr int kSiteFrames = std::tuple_size_v<decltype(FaultSite::frames)>;
constexpr int kShownFrames = 3;

/// "Pager::Impl::start_load" of a mangled name; empty if it is none of the engine's.
std::string short_name(const char* mangled) {
    constexpr std::string_view kOurs = "torch_offload::";
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                           &std::free);
    if (status != 0 || !std::string_view(name.get()).starts_with(kOurs)) return {};
    const std::string whole = name.get();
    const bool is_harness = whole.starts_with("torch_offload::test::");
    return is_harness ? std::string() : whole.substr(kOurs.size(), whole.find('(') - kOurs.size());
}

constexpr std::array<const char*, kFaultThreadCount> kThreadNames = {"any",   "program", "to-ssd", "to-service",
                                                                     "to-up", "to-down", "to-plan"};

bool is_of(FaultThread thread) noexcept {
    if (thread == FaultThread::any) return true;
    if (thread == FaultThread::program) return ::gettid() == ::getpid();
    char name[16] = {};
    ::prctl(PR_GET_NAME, name);
    return std::string_view(name) == kThreadNames[static_cast<std::size_t>(thread)];
}

}  // namespace

const char* name_of(FaultCall call) noexcept {
    constexpr std::array<const char*, kFaultCallCount> kNames = {
        "submit",  "reap",   "register",  "unregister", "read",  "write", "allocation", "mmap",   "mremap",  "mprotect",
        "madvise", "munmap", "fallocate", "ftruncate",  "fcntl", "open",  "mkostemp",   "unlink", "eventfd", "pipe2"};
    return kNames[static_cast<std::size_t>(call)];
}

const char* name_of(FaultThread thread) noexcept { return kThreadNames[static_cast<std::size_t>(thread)]; }

void arm(const Fault& fault) noexcept {
    armed.fault = fault;
    armed.seen = 0;
    armed.injected = 0;
    armed.is_on.store(true, std::memory_order_release);
}

void disarm() noexcept { armed.is_on.store(false, std::memory_order_release); }

bool is_armed() noexcept { return armed.is_on.load(std::memory_order_acquire); }

bool is_due(FaultCall call) noexcept {
    if (!is_armed() || armed.fault.call != call || !is_of(armed.fault.thread)) return false;
    if (spared_depth > 0 && call >= FaultCall::allocation) return false;
    const std::uint64_t number = ++armed.seen;
    if (number < armed.fault.first || number - armed.fault.first >= armed.fault.count) return false;
    if (armed.injected++ == 0 && noted_site) noted_site->depth = ::backtrace(noted_site->frames.data(), kSiteFrames);
    return true;
}

Spared::Spared() noexcept { ++spared_depth; }
Spared::~Spared() { --spared_depth; }

void note_site_in(FaultSite* site) noexcept { noted_site = site; }

std::string describe(const FaultSite& site) {
    std::string text;
    int shown = 0;
    for (int i = 0; i < site.depth && shown < kShownFrames; ++i) {
        Dl_info found{};
        const void* const call = static_cast<const char*>(site.frames[i]) - 1;
        if (::dladdr(call, &found) == 0 || !found.dli_sname) continue;
        const std::string name = short_name(found.dli_sname);
        if (name.empty()) continue;
        text += (shown++ == 0 ? "" : " < ") + name;
    }
    return text;
}

std::uint64_t counted_calls() noexcept { return armed.seen.load(); }
std::uint64_t injected_faults() noexcept { return armed.injected.load(); }

}  // namespace torch_offload::test
