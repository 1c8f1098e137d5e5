// Collects the log lines of a test.
#pragma once

#include <mutex>
#include <string>

#include "base/log.h"

namespace torch_offload::test {

/// Every line written while it lives. One at a time: the sink is a plain function.
class LogCapture {
public:
    explicit LogCapture(LogLevel lowest) {
        text().clear();
        set_log_sink(&append, lowest);
    }
    ~LogCapture() { set_log_sink(nullptr, LogLevel::warning); }
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    std::string lines() const {
        const std::lock_guard lock(mutex());
        return text();
    }

private:
    static void append(LogLevel, const std::string& line) {
        const std::lock_guard lock(mutex());
        text() += line + '\n';
    }
    static std::string& text() {
        static std::string lines;
        return lines;
    }
    static std::mutex& mutex() {
        static std::mutex guard;
        return guard;
    }
};

}  // namespace torch_offload::test
