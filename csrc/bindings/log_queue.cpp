#include "bindings/log_queue.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::size_t kMaxQueuedLines = 1024;

struct LogQueue {
    std::mutex mutex;
    std::vector<std::pair<int, std::string>> lines;
    std::size_t dropped = 0;
    std::atomic<bool> has_lines{false};
};

/// Never destroyed: engine threads may log while the process ends.
LogQueue& queue() {
    static LogQueue* const lines = new LogQueue;
    return *lines;
}

void push_line(LogLevel level, const std::string& line) {
    LogQueue& waiting = queue();
    const std::lock_guard lock(waiting.mutex);
    if (waiting.lines.size() < kMaxQueuedLines) {
        waiting.lines.emplace_back(static_cast<int>(level), line);
    } else {
        ++waiting.dropped;
    }
    waiting.has_lines.store(true, std::memory_order_release);
}

}  // namespace

void collect_log(int level) { set_log_sink(&push_line, static_cast<LogLevel>(level)); }

void deliver_log() {
    LogQueue& waiting = queue();
    if (!waiting.has_lines.exchange(false, std::memory_order_acq_rel)) return;
    std::vector<std::pair<int, std::string>> lines;
    std::size_t dropped = 0;
    {
        const std::lock_guard lock(waiting.mutex);
        lines.swap(waiting.lines);
        dropped = std::exchange(waiting.dropped, 0);
    }
    const py::object log = py::module_::import("logging").attr("getLogger")("torch_offload").attr("log");
    for (const auto& [level, line] : lines) log(level, "%s", line);
    if (dropped > 0) log(static_cast<int>(LogLevel::warning), "%d more lines were dropped", dropped);
}

}  // namespace torch_offload
