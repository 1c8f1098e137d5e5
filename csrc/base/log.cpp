#include "base/log.h"

#include <atomic>

namespace torch_offload {
namespace {

std::atomic<LogSink> current_sink{nullptr};
std::atomic<int> lowest_level{static_cast<int>(LogLevel::warning)};

}  // namespace

void set_log_sink(LogSink sink, LogLevel lowest) noexcept {
    lowest_level.store(static_cast<int>(lowest), std::memory_order_relaxed);
    current_sink.store(sink, std::memory_order_release);
}

bool log_enabled(LogLevel level) noexcept {
    return static_cast<int>(level) >= lowest_level.load(std::memory_order_relaxed) &&
           current_sink.load(std::memory_order_acquire) != nullptr;
}

void write_log(LogLevel level, const std::string& line) {
    if (LogSink sink = current_sink.load(std::memory_order_acquire)) sink(level, line);
}

}  // namespace torch_offload
