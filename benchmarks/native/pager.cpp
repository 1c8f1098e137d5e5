// What it costs to pin what is in memory: nanoseconds of the thread's processor time for a pin and its end, by pages,
// and for noting a use. Prints one JSON object. builds.py compiles it with the engine of either build.
#include "pager/pager.h"

#include <time.h>

#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_offload {
namespace {

constexpr std::size_t kPageElements = 4096;
constexpr std::size_t kPageBytes = kPageElements * 4;
constexpr std::size_t kBudgetBytes = 64 << 20;

double thread_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

template <typename Body>
double ns_each(int count, Body body) {
    const double begin = thread_ns();
    for (int i = 0; i < count; ++i) body();
    return (thread_ns() - begin) / count;
}

std::shared_ptr<Segment> segment_of(Pager& pager, std::size_t page_count) {
    auto segment = pager.create_segment(page_count * kPageBytes, 4, SegmentKind::parameter);
    segment->trace_id = pager.new_trace_id();
    const PinRequest request{segment, Access::overwrite};
    const PinGuard guard = pager.pin({&request, 1});
    return segment;
}

double process_ns() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

/// Of the program's processor time, what looking ahead takes besides, where a step uses the same few segments again and
/// again, as accumulating gradients does.
double look_ahead_share(Pager& pager, int uses) {
    std::vector<std::shared_ptr<Segment>> segments;
    for (int i = 0; i < 100; ++i) segments.push_back(segment_of(pager, 1));
    double own_ns = 0;
    double all_ns = 0;
    for (int step = 0; step < 4; ++step) {
        const double own_before = thread_ns();
        const double all_before = process_ns();
        for (int i = 0; i < uses; ++i) pager.touch(segments[static_cast<std::size_t>(i) % segments.size()]);
        own_ns = thread_ns() - own_before;
        all_ns = process_ns() - all_before;
        pager.end_step();
    }
    return (all_ns - own_ns) / own_ns;
}

}  // namespace
}  // namespace torch_offload

int main(int argc, char** argv) {
    using namespace torch_offload;
    const int count = argc > 2 ? std::stoi(argv[2]) : 100'000;
    PagerOptions options;
    options.budget_bytes = kBudgetBytes;
    options.page_elements = kPageElements;
    options.directories = {argc > 1 ? argv[1] : "."};
    options.engine = IoEngineKind::threads;
    Pager pager(options);
    const char* separator = "{";
    for (const std::size_t page_count : {std::size_t{1}, std::size_t{16}, std::size_t{256}}) {
        const PinRequest request{segment_of(pager, page_count), Access::read};
        const double ns =
            ns_each(count / static_cast<int>(page_count), [&] { const PinGuard guard = pager.pin({&request, 1}); });
        std::printf("%s\"pin_ns_%zu_pages\": %.2f", separator, page_count, ns);
        separator = ", ";
    }
    const auto touched = segment_of(pager, 1);
    std::printf(", \"touch_ns\": %.2f", ns_each(count, [&] { pager.touch(touched); }));
    std::printf(", \"look_ahead_share\": %.3f}\n", look_ahead_share(pager, 2 * count));
}
