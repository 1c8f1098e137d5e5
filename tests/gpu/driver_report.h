// What driver_program has found, as one JSON object on the last line of stdout; progress goes to stderr.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace torch_offload {

/// A contract that does not hold; the message is what was seen instead.
struct NotHeld : std::runtime_error {
    using std::runtime_error::runtime_error;
};
/// What only a GPU can tell.
struct NotInARehearsal : std::runtime_error {
    NotInARehearsal() : std::runtime_error("not in a rehearsal") {}
};

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream text;
    (text << ... << parts);
    throw NotHeld(text.str());
}

inline std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char character : text) {
        if (character == '"' || character == '\\') result += '\\';
        result += static_cast<unsigned char>(character) < 0x20 ? ' ' : character;
    }
    return result + "\"";
}

/// Threads: add() and check() from one. A thread of its own ends the process with what there is when time is up, also
/// where a call of the driver does not return.
class Report {
public:
    Report(const std::string& subcommand, std::chrono::seconds limit)
        : head_("\"program\": \"driver_program\", \"subcommand\": " + quoted(subcommand)),
          watch_([this, limit] { watch(limit); }) {}
    ~Report() {
        {
            const std::lock_guard lock(mutex_);
            has_ended_ = true;
        }
        changed_.notify_all();
        watch_.join();
    }
    Report(const Report&) = delete;
    Report& operator=(const Report&) = delete;

    /// A field of the whole: `value` is JSON.
    void put(const std::string& name, const std::string& value) {
        const std::lock_guard lock(mutex_);
        head_ += ", " + quoted(name) + ": " + value;
    }
    /// One more of the list: `entry` is JSON.
    void add(const std::string& entry) {
        const std::lock_guard lock(mutex_);
        entries_.push_back(entry);
    }
    void begin(const std::string& name) {
        std::fprintf(stderr, "%s\n", name.c_str());
        const std::lock_guard lock(mutex_);
        current_ = name;
    }

    /// Runs one; whatever it throws is what was seen.
    void check(const std::string& name, const std::function<std::string()>& contract) {
        begin(name);
        const auto since = std::chrono::steady_clock::now();
        const char* held = "false";
        std::string seen;
        try {
            seen = contract();
            held = "true";
        } catch (const NotInARehearsal& reason) {
            seen = reason.what();
            held = "null";
        } catch (const std::exception& error) {
            seen = error.what();
            ++failures_;
        }
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
        std::fprintf(stderr, "    held: %s (%.2f s): %s\n", held, seconds, seen.c_str());
        std::ostringstream entry;
        entry << "{\"name\": " << quoted(name) << ", \"held\": " << held << ", \"seen\": " << quoted(seen)
              << ", \"seconds\": " << seconds << "}";
        add(entry.str());
    }

    /// Something that does not belong to a check.
    void fail(const std::string& name, const std::string& seen) {
        std::fprintf(stderr, "    %s: %s\n", name.c_str(), seen.c_str());
        ++failures_;
        add("{\"name\": " + quoted(name) + ", \"held\": false, \"seen\": " + quoted(seen) + "}");
    }

    int failures() const { return failures_; }
    void print() {
        const std::lock_guard lock(mutex_);
        print_all();
    }

private:
    /// The lock is held.
    void print_all() const {
        std::string line = "{" + head_ + ", \"failures\": " + std::to_string(failures_) + ", \"entries\": [";
        for (std::size_t i = 0; i < entries_.size(); ++i) line += (i == 0 ? "" : ", ") + entries_[i];
        std::printf("%s]}\n", line.c_str());
        std::fflush(stdout);
    }

    void watch(std::chrono::seconds limit) {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, limit, [&] { return has_ended_; })) return;
        ++failures_;
        entries_.push_back("{\"name\": " + quoted(current_) + ", \"held\": false, \"seen\": \"it did not end within " +
                           std::to_string(limit.count()) + " s of the whole\"}");
        print_all();
        ::_exit(2);
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    bool has_ended_ = false;
    std::string head_;
    std::string current_ = "the beginning";
    std::vector<std::string> entries_;
    std::atomic<int> failures_ = 0;
    std::thread watch_;  // begins last
};

}  // namespace torch_offload
