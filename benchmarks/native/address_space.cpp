// What it costs to bring a frame to its address and to take it away again: memory moved with mremap, with and without
// huge pages, against a memfd slab mapped MAP_SHARED. Prints one JSON document. Times are the thread's processor time,
// for there is nothing to wait for: other programs on the machine do not count.
//   cmake --build build --target address_space_benchmark && build/benchmarks/address_space_benchmark [--smoke]
#include "device/address_space.h"

#include <sys/mman.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/units.h"

namespace torch_offload {
namespace {

struct Shape {
    std::size_t frame_bytes;
    std::size_t frame_count;
    int runs;

    std::size_t total_bytes() const { return frame_bytes * frame_count; }
};

double thread_microseconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

void check_system(bool succeeded, const char* what) {
    OFFLOAD_CHECK(succeeded, LogicError, what, ": ", std::strerror(errno));
}

/// Frames at a place of their own and at the address where the program reads them.
class Frames {
public:
    virtual ~Frames() = default;
    virtual const char* name() const = 0;
    virtual void map(std::size_t index) = 0;
    virtual void unmap(std::size_t index) = 0;
    virtual std::span<std::byte> mapped(std::size_t index) = 0;
};

enum class HugePages { off, on };

class MovedFrames : public Frames {
public:
    MovedFrames(const Shape& shape, HugePages huge)
        : shape_(shape),
          huge_(huge),
          slots_(AddressSpace::process().reserve(shape.total_bytes(), nullptr)),
          segment_(AddressSpace::process().reserve(shape.total_bytes(), nullptr)) {
        for (std::size_t i = 0; i < shape.frame_count; ++i) {
            AddressSpace::process().commit(slot(i));
            const int advice = huge == HugePages::on ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
            check_system(madvise(slot(i).data(), slot(i).size(), advice) == 0, "madvise");
            AddressSpace::process().hide_from_fork(slot(i), true);
            std::memset(slot(i).data(), 1, slot(i).size());
        }
    }
    ~MovedFrames() override {
        AddressSpace::process().release(slots_);
        AddressSpace::process().release(segment_);
    }

    const char* name() const override { return huge_ == HugePages::on ? "mremap, huge pages" : "mremap, 4 KiB pages"; }
    void map(std::size_t i) override { AddressSpace::process().move(slot(i), mapped(i).data(), Protection::read); }
    void unmap(std::size_t i) override {
        AddressSpace::process().move(mapped(i), slot(i).data(), Protection::read_write);
    }
    std::span<std::byte> mapped(std::size_t i) override {
        return segment_.subspan(i * shape_.frame_bytes, shape_.frame_bytes);
    }

private:
    /// A stride of 7 so that neighbours in one place are none in the other.
    std::span<std::byte> slot(std::size_t i) {
        return slots_.subspan(i * 7 % shape_.frame_count * shape_.frame_bytes, shape_.frame_bytes);
    }

    Shape shape_;
    HugePages huge_;
    std::span<std::byte> slots_;
    std::span<std::byte> segment_;
};

class MemfdFrames : public Frames {
public:
    explicit MemfdFrames(const Shape& shape) : shape_(shape), file_(memfd_create("slab", MFD_CLOEXEC)) {
        check_system(file_ >= 0, "memfd_create");
        check_system(ftruncate(file_, static_cast<off_t>(shape.total_bytes())) == 0, "ftruncate");
        void* slab = mmap(nullptr, shape.total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        check_system(slab != MAP_FAILED, "mapping the slab");
        std::memset(slab, 1, shape.total_bytes());
        munmap(slab, shape.total_bytes());
        segment_ = AddressSpace::process().reserve(shape.total_bytes(), nullptr);
    }
    ~MemfdFrames() override {
        AddressSpace::process().release(segment_);
        close(file_);
    }

    const char* name() const override { return "memfd, MAP_SHARED | MAP_POPULATE"; }
    void map(std::size_t i) override {
        const auto offset = static_cast<off_t>(i * 7 % shape_.frame_count * shape_.frame_bytes);
        constexpr int kFlags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
        check_system(mmap(mapped(i).data(), shape_.frame_bytes, PROT_READ, kFlags, file_, offset) != MAP_FAILED,
                     "mmap");
    }
    void unmap(std::size_t i) override { AddressSpace::process().decommit(mapped(i)); }
    std::span<std::byte> mapped(std::size_t i) override {
        return segment_.subspan(i * shape_.frame_bytes, shape_.frame_bytes);
    }

private:
    Shape shape_;
    int file_;
    std::span<std::byte> segment_;
};

/// The middle of the runs, with the two ends.
struct Spread {
    double median;
    double lowest;
    double highest;
};

Spread spread_of(std::vector<double> values) {
    std::ranges::sort(values);
    return {values[values.size() / 2], values.front(), values.back()};
}

std::size_t count_mappings() {
    std::ifstream maps("/proc/self/maps");
    return static_cast<std::size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
}

double mean_microseconds(const Shape& shape, const std::function<void(std::size_t)>& step) {
    const double start_us = thread_microseconds();
    for (std::size_t i = 0; i < shape.frame_count; ++i) step(i);
    return (thread_microseconds() - start_us) / static_cast<double>(shape.frame_count);
}

void print_spread(const char* name, const Spread& spread) {
    std::printf("\"%s\": {\"median\": %.2f, \"min\": %.2f, \"max\": %.2f}, ", name, spread.median, spread.lowest,
                spread.highest);
}

void measure(Frames& frames, const Shape& shape, const char* separator) {
    const std::size_t mappings_before = count_mappings();
    std::size_t mappings_added = 0;
    std::vector<double> map_us, touch_us, unmap_us, gigabytes_per_second;
    std::size_t sum = 0;
    for (int run = -1; run < shape.runs; ++run) {  // the first one warms up
        const double map = mean_microseconds(shape, [&](std::size_t i) { frames.map(i); });
        const double touch = mean_microseconds(shape, [&](std::size_t i) {
            const std::span<std::byte> bytes = frames.mapped(i);
            for (std::size_t k = 0; k < bytes.size(); k += kSectorBytes) sum += static_cast<std::size_t>(bytes[k]);
        });
        mappings_added = count_mappings() - mappings_before;
        const double unmap = mean_microseconds(shape, [&](std::size_t i) { frames.unmap(i); });
        if (run < 0) continue;
        map_us.push_back(map);
        touch_us.push_back(touch);
        unmap_us.push_back(unmap);
        gigabytes_per_second.push_back(static_cast<double>(shape.frame_bytes) / (map + unmap) / 1e3);
    }
    const std::size_t sectors = shape.total_bytes() / kSectorBytes;
    OFFLOAD_CHECK(sum == sectors * static_cast<std::size_t>(shape.runs + 1), LogicError, "wrong bytes at the address");
    std::printf("    {\"frames\": \"%s\", \"frame_bytes\": %zu, \"runs\": %d, ", frames.name(), shape.frame_bytes,
                shape.runs);
    print_spread("map_us", spread_of(map_us));
    print_spread("touch_us", spread_of(touch_us));
    print_spread("unmap_us", spread_of(unmap_us));
    print_spread("map_and_unmap_gb_s", spread_of(gigabytes_per_second));
    std::printf("\"mappings_per_mapped_frame\": %.2f}%s\n",
                static_cast<double>(mappings_added) / static_cast<double>(shape.frame_count), separator);
}

std::string first_line(const char* path) {
    std::string line = "unknown";
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

void run(const Shape& smallest, const Shape& largest) {
    utsname system{};
    check_system(uname(&system) == 0, "uname");
    std::printf("{\n  \"kernel\": \"%s\", \"processors\": %ld, \"transparent_huge_pages\": \"%s\",\n  \"results\": [\n",
                system.release, sysconf(_SC_NPROCESSORS_ONLN),
                first_line("/sys/kernel/mm/transparent_hugepage/enabled").c_str());
    for (const Shape* chosen : {&smallest, &largest}) {
        const Shape& shape = *chosen;
        MovedFrames with_huge_pages(shape, HugePages::on);
        measure(with_huge_pages, shape, ",");
        MovedFrames without_huge_pages(shape, HugePages::off);
        measure(without_huge_pages, shape, ",");
        MemfdFrames shared(shape);
        measure(shared, shape, chosen == &largest ? "" : ",");
    }
    std::printf("  ]\n}\n");
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) {
    const bool smoke = argument_count == 2 && std::strcmp(arguments[1], "--smoke") == 0;
    const std::size_t frame_count = smoke ? 16 : 128;
    const int runs = smoke ? 5 : 15;
    torch_offload::run({torch_offload::kHugePageBytes, frame_count, runs},
                       {2 * torch_offload::kHugePageBytes, frame_count, runs});
}
