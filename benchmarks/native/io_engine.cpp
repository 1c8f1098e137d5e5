// How fast the I/O engine of the storage layer moves blocks between a file and memory. One run, one JSON object.
//   cmake --build build --target io_engine_benchmark
//   build/benchmarks/io_engine_benchmark --file FILE --file-mib 4096 [--direction read|write|mix] [--engine automatic]
//       [--block-kib 2048] [--depth 16] [--mib 4096 | --seconds 3] [--huge-pages]
// Reads and writes each walk through the file from its beginning, again from there at its end; the mix tosses a coin
// per block, as fio does. The file is opened with O_DIRECT and made if it is missing. With --seconds it says
// "started" on a line of its own once the first transfers are in flight.
#include "storage/io_engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "storage/file_descriptor.h"

namespace torch_offload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTransferTimeout{30};
constexpr std::uint64_t kSeed = 1;
const std::map<std::string, IoEngineKind> kEngines = {{"automatic", IoEngineKind::automatic},
                                                      {"uring_fixed", IoEngineKind::uring_fixed},
                                                      {"uring", IoEngineKind::uring},
                                                      {"threads", IoEngineKind::threads}};
const std::map<std::string, double> kReadShares = {{"read", 1.0}, {"mix", 0.5}, {"write", 0.0}};

struct Options {
    std::string file;
    std::string direction = "read";
    std::string engine = "automatic";
    std::size_t file_bytes = 0;
    std::size_t block_bytes = 2 * kMiB;
    std::size_t depth = 16;
    std::size_t total_bytes = 0;  // 0: as long as `seconds` says
    double seconds = 0;
    bool with_huge_pages = false;
};

Options parse(int argument_count, char** arguments) {
    Options options;
    for (int i = 1; i < argument_count; ++i) {
        const std::string name = arguments[i];
        if (name == "--huge-pages") {
            options.with_huge_pages = true;
            continue;
        }
        OFFLOAD_CHECK(i + 1 < argument_count, InvalidArgument, name, " needs a value");
        const std::string value = arguments[++i];
        if (name == "--file")
            options.file = value;
        else if (name == "--direction")
            options.direction = value;
        else if (name == "--engine")
            options.engine = value;
        else if (name == "--file-mib")
            options.file_bytes = std::stoul(value) * kMiB;
        else if (name == "--block-kib")
            options.block_bytes = std::stoul(value) * kKiB;
        else if (name == "--depth")
            options.depth = std::stoul(value);
        else if (name == "--mib")
            options.total_bytes = std::stoul(value) * kMiB;
        else if (name == "--seconds")
            options.seconds = std::stod(value);
        else
            throw InvalidArgument("unknown option " + name);
    }
    OFFLOAD_CHECK(!options.file.empty() && kEngines.contains(options.engine) && kReadShares.contains(options.direction),
                  InvalidArgument, "--file, a known --engine and a known --direction are needed");
    OFFLOAD_CHECK(options.file_bytes >= options.block_bytes && options.block_bytes > 0 && options.depth > 0,
                  InvalidArgument, "--file-mib must hold at least one block, --depth at least one transfer");
    OFFLOAD_CHECK((options.total_bytes > 0) != (options.seconds > 0), InvalidArgument,
                  "exactly one of --mib and --seconds is needed");
    return options;
}

/// One buffer per transfer in flight, filled with random bytes: from malloc, as fio's, or in huge pages, as the
/// pager's.
class Buffers {
public:
    explicit Buffers(const Options& options)
        : alignment_bytes_(options.with_huge_pages ? kHugePageBytes : kSectorBytes),
          block_bytes_(options.block_bytes),
          stride_bytes_(round_up(options.block_bytes, alignment_bytes_)),
          memory_(std::malloc(stride_bytes_ * options.depth + alignment_bytes_)) {
        OFFLOAD_CHECK(memory_, InvalidArgument, "no memory for ", options.depth, " buffers");
        const auto address = reinterpret_cast<std::size_t>(memory_.get());
        first_ = reinterpret_cast<std::byte*>(round_up(address, alignment_bytes_));
        const std::size_t size_bytes = stride_bytes_ * options.depth;
        OFFLOAD_CHECK(!options.with_huge_pages || ::madvise(first_, size_bytes, MADV_HUGEPAGE) == 0, InvalidArgument,
                      "no huge pages: ", std::strerror(errno));
        if (options.direction == "read") return;  // as fio: what only receives is first touched by its registration
        std::mt19937_64 random(kSeed);
        auto* words = reinterpret_cast<std::uint64_t*>(first_);
        std::generate(words, words + size_bytes / sizeof *words, random);
    }

    std::span<std::byte> block(std::size_t index) const { return {first_ + index * stride_bytes_, block_bytes_}; }

private:
    struct Free {
        void operator()(void* memory) const noexcept { std::free(memory); }
    };

    std::size_t alignment_bytes_;
    std::size_t block_bytes_;
    std::size_t stride_bytes_;
    std::unique_ptr<void, Free> memory_;
    std::byte* first_ = nullptr;
};

FileDescriptor open_file(const Options& options) {
    FileDescriptor file(::open(options.file.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    OFFLOAD_CHECK(file, InvalidArgument, "cannot open ", options.file, ": ", std::strerror(errno));
    struct stat status{};
    OFFLOAD_CHECK(::fstat(file.get(), &status) == 0, InvalidArgument, "fstat: ", std::strerror(errno));
    if (static_cast<std::size_t>(status.st_size) < options.file_bytes) {
        const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(options.file_bytes));
        OFFLOAD_CHECK(error == 0, InvalidArgument, "no room for ", options.file_bytes,
                      " bytes: ", std::strerror(error));
    }
    return file;
}

double processor_seconds() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + time.tv_usec * 1e-6; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Keeps `depth` transfers in flight until all bytes are moved or the time is over.
class Run {
public:
    Run(const Options& options, IoEngine& engine, int file, const Buffers& buffers)
        : options_(options),
          engine_(engine),
          read_share_(kReadShares.at(options.direction)),
          requests_(options.depth),
          finished_(options.depth) {
        for (std::size_t i = 0; i < options.depth; ++i) {
            requests_[i].file_descriptor = file;
            requests_[i].buffer = buffers.block(i);
            requests_[i].fixed_index = engine.register_buffer(buffers.block(i));
            requests_[i].fixed_address = requests_[i].buffer.data();
            registered_count_ += requests_[i].fixed_index != kUnregistered;
        }
    }
    ~Run() {
        for (IoRequest& request : requests_) {
            if (request.fixed_index != kUnregistered) engine_.unregister_buffer(request.fixed_index);
        }
    }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    void execute() {
        const double processor_before = processor_seconds();
        started_ = Clock::now();
        for (IoRequest& request : requests_) start(request);
        if (options_.seconds > 0) {
            std::printf("started\n");
            std::fflush(stdout);
        }
        while (in_flight_count_ > 0) {
            const std::size_t count = engine_.reap(finished_, kTransferTimeout);
            if (count == 0) {
                throw TierIoError(concat("no transfer ended within ", kTransferTimeout.count(), " s"), ETIMEDOUT);
            }
            for (IoRequest* request : std::span(finished_).first(count)) finish(*request);
        }
        wall_seconds_ = elapsed_seconds();
        processor_seconds_ = processor_seconds() - processor_before;
    }

    void print() const {
        std::printf(
            "{\"engine\": \"%s\", \"direction\": \"%s\", \"block_bytes\": %zu, \"depth\": %zu, "
            "\"registered_buffers\": %zu, \"huge_pages\": %s, \"read_bytes\": %zu, \"written_bytes\": %zu, "
            "\"seconds\": %.6f, \"processor_seconds\": %.6f, \"resubmissions\": %zu, \"repetitions_after_eio\": %zu, "
            "\"bytes_per_second\": %.0f}\n",
            engine_.name().c_str(), options_.direction.c_str(), options_.block_bytes, options_.depth, registered_count_,
            options_.with_huge_pages ? "true" : "false", read_bytes_, written_bytes_, wall_seconds_, processor_seconds_,
            resubmission_count_, repetition_count_, static_cast<double>(read_bytes_ + written_bytes_) / wall_seconds_);
    }

private:
    double elapsed_seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

    bool is_over() const {
        return options_.seconds > 0 ? elapsed_seconds() >= options_.seconds : issued_bytes_ >= options_.total_bytes;
    }

    void start(IoRequest& request) {
        if (is_over()) return;
        const bool is_read = coin_(random_) < read_share_;
        std::size_t& position = is_read ? read_position_ : write_position_;
        if (position + options_.block_bytes > options_.file_bytes) position = 0;
        request.direction = is_read ? IoDirection::read : IoDirection::write;
        request.offset_bytes = position;
        position += options_.block_bytes;
        issued_bytes_ += options_.block_bytes;
        IoRequest* pointer = &request;
        OFFLOAD_CHECK(engine_.submit({&pointer, 1}) == 1, LogicError, "the engine took no transfer");
        ++in_flight_count_;
    }

    void finish(IoRequest& request) {
        --in_flight_count_;
        if (request.error != 0 || request.done_bytes != request.buffer.size()) {
            throw TierIoError(concat("a transfer of ", request.buffer.size(), " bytes at offset ", request.offset_bytes,
                                     " moved ", request.done_bytes, ": ", std::strerror(request.error)),
                              request.error);
        }
        (request.direction == IoDirection::read ? read_bytes_ : written_bytes_) += request.done_bytes;
        resubmission_count_ += request.rounds;
        repetition_count_ += request.retries;
        start(request);
    }

    const Options& options_;
    IoEngine& engine_;
    const double read_share_;
    std::vector<IoRequest> requests_;
    std::vector<IoRequest*> finished_;
    std::mt19937_64 random_{kSeed};
    std::uniform_real_distribution<double> coin_{0.0, 1.0};
    Clock::time_point started_;
    std::size_t registered_count_ = 0;
    std::size_t in_flight_count_ = 0;
    std::size_t read_position_ = 0;
    std::size_t write_position_ = 0;
    std::size_t issued_bytes_ = 0;
    std::size_t read_bytes_ = 0;
    std::size_t written_bytes_ = 0;
    std::size_t resubmission_count_ = 0;
    std::size_t repetition_count_ = 0;
    double wall_seconds_ = 0;
    double processor_seconds_ = 0;
};

void run(const Options& options) {
    const FileDescriptor file = open_file(options);
    const Buffers buffers(options);
    const auto engine = make_io_engine(kEngines.at(options.engine), options.depth);
    Run run(options, *engine, file.get(), buffers);
    run.execute();
    run.print();
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) {
    try {
        torch_offload::run(torch_offload::parse(argument_count, arguments));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "io_engine_benchmark: %s\n", error.what());
        return 1;
    }
    return 0;
}
