#include "storage/ssd_probe.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/check.h"
#include "base/units.h"

namespace torch_offload {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPatience{30'000};  // for one transfer, before the disk counts as stuck
constexpr std::uint64_t kStampSeed = 0x746f6666'6c6f6164;

SsdProbeOptions checked(const SsdProbeOptions& options) {
    OFFLOAD_CHECK(options.block_bytes > 0 && options.block_bytes % kSectorBytes == 0, InvalidArgument,
                  "block_bytes must be a positive multiple of ", kSectorBytes, ", got ", options.block_bytes);
    OFFLOAD_CHECK(options.max_depth > 0, InvalidArgument, "max_depth must be at least 1, got 0");
    const std::size_t needed_bytes = 2 * options.max_depth * options.block_bytes;
    OFFLOAD_CHECK(options.file_bytes >= needed_bytes, InvalidArgument, "a depth of ", options.max_depth,
                  " needs a file of at least ", needed_bytes, " bytes, got ", options.file_bytes,
                  "; give a larger size or a smaller depth");
    return options;
}

std::byte* aligned_memory(const SsdProbeOptions& options) {
    const std::size_t rounded_bytes = round_up(options.max_depth * options.block_bytes, kHugePageBytes);
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, rounded_bytes));
    if (memory == nullptr) throw std::bad_alloc();
    if (options.prepare_memory != nullptr) options.prepare_memory({memory, rounded_bytes});
    std::memset(memory, 0, rounded_bytes);
    return memory;
}

std::uint64_t stamp_of(std::size_t block, std::size_t offset_bytes) noexcept {
    return kStampSeed ^ (static_cast<std::uint64_t>(block) << 32) ^ offset_bytes;
}

/// One word per sector: a transfer that goes astray by a sector is seen, and the processor stays free.
void stamp(std::span<std::byte> bytes, std::size_t block) noexcept {
    for (std::size_t offset = 0; offset < bytes.size(); offset += kSectorBytes) {
        const std::uint64_t word = stamp_of(block, offset);
        std::memcpy(bytes.data() + offset, &word, sizeof word);
    }
}

bool is_stamped(std::span<const std::byte> bytes, std::size_t block) noexcept {
    for (std::size_t offset = 0; offset < bytes.size(); offset += kSectorBytes) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + offset, sizeof word);
        if (word != stamp_of(block, offset)) return false;
    }
    return true;
}

}  // namespace

/// One transfer in flight and where it lies.
struct SsdProbe::Slot {
    IoRequest request;
    std::size_t block = 0;
};

/// One measurement under way.
struct SsdProbe::Run {
    SsdLoad load{};
    Clock::time_point deadline{};
    std::vector<Slot*> idle{};
    std::size_t in_flight = 0;
    bool is_next_write = false;
    SsdBandwidth result{};
};

SsdProbe::SsdProbe(const SsdProbeOptions& options)
    : block_bytes_(checked(options).block_bytes),
      block_count_(options.file_bytes / options.block_bytes),
      max_depth_(options.max_depth),
      random_(kStampSeed),
      is_busy_(block_count_, false),
      file_(options.directory),
      extent_(file_.allocate(block_count_ * block_bytes_)),
      memory_(aligned_memory(options)),
      slots_(max_depth_),
      engine_(make_io_engine(options.engine, max_depth_)) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        IoRequest& request = slots_[i].request;
        request.file_descriptor = file_.file_descriptor();
        request.buffer = buffer_of(i);
        request.context = &slots_[i];
        request.fixed_index = engine_->register_buffer(request.buffer);
        request.fixed_address = request.buffer.data();
    }
    fill_file();
}

SsdProbe::~SsdProbe() = default;

void SsdProbe::Free::operator()(std::byte* memory) const noexcept { std::free(memory); }

bool SsdProbe::is_direct() const noexcept { return (::fcntl(file_.file_descriptor(), F_GETFL) & O_DIRECT) != 0; }

std::span<std::byte> SsdProbe::buffer_of(std::size_t slot) const noexcept {
    return {memory_.get() + slot * block_bytes_, block_bytes_};
}

/// Extents that were never written read as zeros without the disk.
void SsdProbe::fill_file() {
    Run run;
    for (Slot& slot : slots_) run.idle.push_back(&slot);
    for (std::size_t block = 0; block < block_count_; ++block) {
        if (run.idle.empty()) collect(run);
        start(*run.idle.back(), IoDirection::write, block);
        run.idle.pop_back();
        ++run.in_flight;
    }
    while (run.in_flight > 0) collect(run);
}

SsdBandwidth SsdProbe::measure(const SsdLoad& load) {
    OFFLOAD_CHECK(load.depth >= 1 && load.depth <= max_depth_, InvalidArgument, "the depth must be 1 to ", max_depth_,
                  ", got ", load.depth);
    const Clock::time_point begin = Clock::now();
    Run run{.load = load, .deadline = begin + load.duration, .is_next_write = load.pattern == SsdPattern::write};
    for (Slot& slot : std::span(slots_).first(load.depth)) run.idle.push_back(&slot);
    for (pump(run); run.in_flight > 0; pump(run)) collect(run);
    run.result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return run.result;
}

/// Sends every idle slot on its way, until the time is up; at least one.
void SsdProbe::pump(Run& run) {
    const bool is_first = run.result.read_bytes + run.result.written_bytes == 0 && run.in_flight == 0;
    while (!run.idle.empty() && (is_first || Clock::now() < run.deadline)) {
        start(*run.idle.back(), run.is_next_write ? IoDirection::write : IoDirection::read, next_block());
        run.idle.pop_back();
        ++run.in_flight;
        if (run.load.pattern == SsdPattern::mix) run.is_next_write = !run.is_next_write;
    }
}

void SsdProbe::collect(Run& run) {
    std::vector<IoRequest*> finished(run.in_flight);
    const std::size_t count = engine_->reap(finished, kPatience);
    if (count == 0) throw TierIoError("no transfer came back in 30 s from " + file_.directory(), ETIMEDOUT);
    for (IoRequest* request : std::span(finished).first(count)) {
        auto& slot = *static_cast<Slot*>(request->context);
        finish(slot);
        (request->direction == IoDirection::read ? run.result.read_bytes : run.result.written_bytes) += block_bytes_;
        run.idle.push_back(&slot);
        --run.in_flight;
    }
}

void SsdProbe::start(Slot& slot, IoDirection direction, std::size_t block) {
    slot.block = block;
    slot.request.direction = direction;
    slot.request.offset_bytes = extent_.offset_bytes + block * block_bytes_;
    if (direction == IoDirection::write) stamp(slot.request.buffer, block);
    IoRequest* pointer = &slot.request;
    OFFLOAD_CHECK(engine_->submit({&pointer, 1}) == 1, LogicError,
                  "the engine takes fewer transfers than its capacity");
    is_busy_[block] = true;
}

/// Throws: TierIoError or CorruptPage.
void SsdProbe::finish(const Slot& slot) {
    is_busy_[slot.block] = false;
    const IoRequest& request = slot.request;
    const char* const verb = request.direction == IoDirection::read ? "reading" : "writing";
    if (request.error != 0) {
        throw TierIoError(concat(verb, " ", block_bytes_, " bytes at ", request.offset_bytes,
                                 " of the scratch file in ", file_.directory(), ": ", std::strerror(request.error)),
                          request.error);
    }
    if (request.direction == IoDirection::read && !is_stamped(request.buffer, slot.block)) {
        throw CorruptPage(concat("the bytes read at ", request.offset_bytes, " of the scratch file in ",
                                 file_.directory(), " are not those written there; this disk cannot be trusted"));
    }
}

/// A random block without a transfer in flight. There is always one: the file has twice as many as slots.
std::size_t SsdProbe::next_block() {
    std::uniform_int_distribution<std::size_t> any(0, block_count_ - 1);
    std::size_t block = any(random_);
    while (is_busy_[block]) block = any(random_);
    return block;
}

}  // namespace torch_offload
