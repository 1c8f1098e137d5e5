// One-line logging to a sink that the layer above chooses. Layer base: includes nothing of this project.
#pragma once

#include <new>
#include <sstream>
#include <string>

namespace torch_offload {

enum class LogLevel { debug = 10, info = 20, warning = 30, error = 40 };  // Python's logging numbers

/// Receives every line at or above the level set. Called without any lock of the engine held.
using LogSink = void (*)(LogLevel level, const std::string& line);

/// Replaces the sink (nullptr: silent, the default) and the lowest level passed to it.
/// Threads: any.
void set_log_sink(LogSink sink, LogLevel lowest) noexcept;

bool log_enabled(LogLevel level) noexcept;
void write_log(LogLevel level, const std::string& line);

}  // namespace torch_offload

/// OFFLOAD_LOG(info, "opened ", path): formats only when the level is enabled. Never throws: a line that there is no
/// memory for is left out.
#define OFFLOAD_LOG(level, ...)                                                                       \
    do {                                                                                              \
        if (::torch_offload::log_enabled(::torch_offload::LogLevel::level)) {                         \
            try {                                                                                     \
                std::ostringstream offload_log_line;                                                  \
                ::torch_offload::log_parts(offload_log_line, __VA_ARGS__);                            \
                ::torch_offload::write_log(::torch_offload::LogLevel::level, offload_log_line.str()); \
            } catch (const std::bad_alloc&) {                                                         \
            }                                                                                         \
        }                                                                                             \
    } while (false)

namespace torch_offload {
template <typename... Parts>
void log_parts(std::ostringstream& stream, const Parts&... parts) {
    (stream << ... << parts);
}
}  // namespace torch_offload
