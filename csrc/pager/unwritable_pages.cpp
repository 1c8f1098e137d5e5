#include "pager/unwritable_pages.h"

#include <algorithm>
#include <new>
#include <utility>

namespace torch_offload {
namespace {

constexpr std::int64_t kFirstRestNs = 100'000'000;
constexpr std::int64_t kMaxRestNs = 5'000'000'000;

}  // namespace

void UnwritablePages::add(const Page& page, std::exception_ptr error, std::int64_t now_ns) noexcept try {
    Failure& failure = pages_[&page];
    failure.error = error;
    failure.is_said = false;
    failure.rest_ns = std::clamp(2 * failure.rest_ns, kFirstRestNs, kMaxRestNs);
    failure.until_ns = now_ns + failure.rest_ns;
} catch (const std::bad_alloc&) {
    unlisted_error_ = error;
}

void UnwritablePages::remove(const Page& page) noexcept { pages_.erase(&page); }

bool UnwritablePages::is_resting(const Page& page, std::int64_t now_ns) const noexcept {
    if (pages_.empty()) return false;
    const auto found = pages_.find(&page);
    return found != pages_.end() && now_ns < found->second.until_ns;
}

std::exception_ptr UnwritablePages::error_of(const std::function<bool(const Page&)>& is_meant) {
    std::exception_ptr error = std::exchange(unlisted_error_, nullptr);
    for (auto& [page, failure] : pages_) {
        if (!is_meant(*page)) continue;
        error = failure.error;
        failure.is_said = true;
    }
    return error;
}

std::exception_ptr UnwritablePages::unsaid_error() {
    return error_of([this](const Page& page) { return !pages_.at(&page).is_said; });
}

}  // namespace torch_offload
