// What torch.profiler shows of the engine among the operators of the program. Layer autograd.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <utility>

namespace torch_offload {

/// A range of torch's profiler while it lives, if one watches this thread and `is_wanted()` says so. Without a profiler
/// the condition is not asked, and it costs what an operator pays for being watchable.
class ProfilerRange {
public:
    template <typename Condition>
    ProfilerRange(const char* name, const Condition& is_wanted) {
        std::optional<at::StepCallbacks> watchers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
        if (!watchers || !is_wanted()) return;
        range_.emplace(std::move(*watchers));
        range_->before(name);
    }
    explicit ProfilerRange(const char* name) : ProfilerRange(name, [] { return true; }) {}
    ProfilerRange(const ProfilerRange&) = delete;
    ProfilerRange& operator=(const ProfilerRange&) = delete;

private:
    std::optional<at::RecordFunction> range_;
};

}  // namespace torch_offload
