// Ranges that release themselves, fault targets that do what a test says, and ways to look at memory from outside.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "device/address_space.h"

namespace torch_offload::test {

inline constexpr std::size_t kFrameBytes = 4 * kMiB;

inline AddressSpace& space() { return AddressSpace::process(); }

/// Reserved addresses of one test.
class Range {
public:
    explicit Range(std::size_t size_bytes, FaultTarget* target = nullptr)
        : bytes_(space().reserve(size_bytes, target)) {}
    ~Range() { space().release(bytes_); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }
    std::byte* begin() const { return bytes_.data(); }

private:
    std::span<std::byte> bytes_;
};

/// Asks the kernel whether a byte is readable: a system call gets EFAULT where a load would fault.
inline bool is_readable(const std::byte* address) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) return false;
    const ssize_t written = write(ends[1], address, 1);
    const int error_number = errno;
    close(ends[0]);
    close(ends[1]);
    EXPECT_TRUE(written == 1 || error_number == EFAULT) << std::strerror(error_number);
    return written == 1;
}

inline std::byte load(const std::byte* address) { return *const_cast<const volatile std::byte*>(address); }
inline void store(std::byte* address, std::byte value) { *const_cast<volatile std::byte*>(address) = value; }

inline void fill(std::span<std::byte> bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = random();
        std::memcpy(&bytes[i], &word, sizeof word);
    }
}

inline std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Does what a test says on a fault, and remembers the fault.
class ScriptedTarget : public FaultTarget {
public:
    explicit ScriptedTarget(std::function<void()> answer) : answer_(std::move(answer)) {}

    void resolve_fault(std::byte* address, bool is_write) noexcept override {
        address_ = address;
        was_write_ = is_write;
        ++count_;
        answer_();
    }

    std::byte* address() const { return address_; }
    bool was_write() const { return was_write_; }
    int count() const { return count_; }

private:
    std::function<void()> answer_;
    std::atomic<std::byte*> address_{nullptr};
    std::atomic<bool> was_write_{false};
    std::atomic<int> count_{0};
};

/// Touches every sector.
inline std::byte sum_of_sectors(std::span<const std::byte> bytes) {
    std::byte sum{0};
    for (std::size_t i = 0; i < bytes.size(); i += kSectorBytes) sum ^= load(&bytes[i]);
    return sum;
}

inline std::size_t resident_bytes() {
    std::size_t total_pages = 0;
    std::size_t resident_pages = 0;
    std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
    return resident_pages * kSectorBytes;
}

/// One line of smaps, without its name, of each mapping that touches `bytes`.
inline std::vector<std::string> smaps_lines(std::span<const std::byte> bytes, const std::string& name) {
    std::ifstream smaps("/proc/self/smaps");
    bool inside = false;
    std::vector<std::string> found;
    for (std::string line; std::getline(smaps, line);) {
        void* begin = nullptr;
        void* end = nullptr;
        if (std::sscanf(line.c_str(), "%p-%p ", &begin, &end) == 2) {
            inside = begin < bytes.data() + bytes.size() && end > bytes.data();
        } else if (inside && line.rfind(name + ":", 0) == 0) {
            found.push_back(line.substr(name.size() + 1));
        }
    }
    return found;
}

/// The sum of one line of smaps over the mappings that touch `bytes`.
inline std::size_t smaps_bytes(std::span<const std::byte> bytes, const std::string& name) {
    std::size_t total = 0;
    for (const std::string& line : smaps_lines(bytes, name)) total += std::stoul(line) * kKiB;
    return total;
}

/// Whether all mappings that touch `bytes` have a flag of two letters of smaps' VmFlags.
inline bool has_flag(std::span<const std::byte> bytes, std::string_view flag) {
    const std::vector<std::string> mappings = smaps_lines(bytes, "VmFlags");
    return !mappings.empty() && std::ranges::all_of(mappings, [flag](const std::string& flags) {
        return (flags + ' ').find(concat(' ', flag, ' ')) != std::string::npos;
    });
}

}  // namespace torch_offload::test
