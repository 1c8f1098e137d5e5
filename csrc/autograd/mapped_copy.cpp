#include "autograd/mapped_copy.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "autograd/engine.h"
#include "base/check.h"
#include "base/units.h"
#include "device/address_space_advice.h"

namespace torch_offload {
namespace {

constexpr std::size_t kBlockCount = 8;
constexpr std::size_t kBudgetShare = 8;               // one part in so many of the budget holds what is read ahead
constexpr std::size_t kMaxAheadBytes = 16 * kMiB;     // more delays who touches the mapping meanwhile
constexpr std::size_t kMinDirectBytes = 1 * kMiB;     // below, finding the file costs more than it saves
constexpr std::size_t kAskedAheadBytes = 64 * kMiB;   // of a file decide whether it is read past the page cache
constexpr std::size_t kTouchedNextBytes = 64 * kKiB;  // behind a tensor: where the next ones begin, small ones between
constexpr std::size_t kStepsAhead = 8;                // a mapping is read ahead, copied and let go in so many parts

std::size_t ahead_bytes(Engine& engine) {
    return std::min(kMaxAheadBytes, engine.pager().options().budget_bytes / kBudgetShare);
}

/// Copies part after part of `source` by `copy(offset in source, target)`, so that the pager can let pages go while the
/// next ones are copied. From page `first` on.
template <typename Copy>
void copy_by_page(Engine& engine, const std::shared_ptr<Segment>& segment, std::size_t size_bytes, Copy copy,
                  std::size_t first = 0) {
    for (std::size_t page = first; page < segment->page_count(); ++page) {
        const std::size_t begin = page * segment->page_bytes();
        const PinGuard guard = engine.pin_pages(segment, page, 1, Access::overwrite);
        copy(begin, segment->range().subspan(begin, std::min(segment->page_bytes(), size_bytes - begin)));
    }
}

/// What the system reads ahead of a mapping counts against the budget meanwhile: a memory control group counts it as
/// well. Nothing is read ahead where no page can make room.
class ReadAhead {
public:
    explicit ReadAhead(Engine& engine) : engine_(engine), size_bytes_(ahead_bytes(engine)) {
        try {
            engine_.reserve_small(size_bytes_);
        } catch (const OutOfTierMemory&) {
            size_bytes_ = 0;
        }
    }
    ~ReadAhead() { engine_.pager().count_small(-static_cast<std::ptrdiff_t>(size_bytes_)); }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    std::size_t size_bytes() const noexcept { return size_bytes_; }

private:
    Engine& engine_;
    std::size_t size_bytes_;
};

/// The mapping is read ahead of the copy, and its memory let go behind it.
void copy_through_mapping(Engine& engine, const std::shared_ptr<Segment>& segment, std::span<const std::byte> source) {
    const ReadAhead read_ahead(engine);
    const std::size_t step_bytes = std::max(read_ahead.size_bytes() / kStepsAhead, kSectorBytes);
    std::size_t read_bytes = 0;
    copy_by_page(engine, segment, source.size(), [&](std::size_t begin, std::span<std::byte> target) {
        for (std::size_t done = 0; done < target.size(); done += step_bytes) {
            const std::size_t part_bytes = std::min(step_bytes, target.size() - done);
            const std::size_t ahead = std::max(read_bytes, begin + done + read_ahead.size_bytes());
            advise_read_ahead(source.data() + read_bytes, ahead - read_bytes);
            read_bytes = ahead;
            std::memcpy(target.data() + done, source.data() + begin + done, part_bytes);
            advise_not_needed(source.subspan(begin + done, part_bytes));
        }
    });
}

}  // namespace

void copy_in(Engine& engine, const std::shared_ptr<Segment>& segment, std::span<const std::byte> source,
             c10::Device source_device) {
    copy_by_page(engine, segment, source.size(), [&](std::size_t begin, std::span<std::byte> target) {
        copy_bytes(target, engine.torch_device(), source.subspan(begin, target.size()), source_device);
    });
}

MappedCopy::Stream::Stream(Engine& engine, MappedFile file)
    : engine_(engine), memory_(engine.allocate_range(std::max(ahead_bytes(engine), kBlockCount * kSectorBytes))) {
    try {
        auto threads = make_io_engine(IoEngineKind::threads, kBlockCount);
        blocks_ = std::make_unique<BlockStream>(std::move(file), std::move(threads), memory_, kBlockCount);
    } catch (...) {
        engine_.pager().free_range(memory_);
        throw;
    }
}

MappedCopy::Stream::~Stream() {
    blocks_.reset();  // waits for reads into the memory
    engine_.pager().free_range(memory_);
}

bool MappedCopy::may_leave_in_files() const noexcept { return !engine_.copies_checkpoints() && !engine_.has_device(); }

bool MappedCopy::Stream::is_of(const MappedFile& file) const noexcept {
    return thread_ == std::this_thread::get_id() && blocks_->file().is_same_content(file);
}

/// The file as one that pages lie in, or nothing if they cannot. A file that was not known is taken out of `file`.
std::shared_ptr<const HomeFile> MappedCopy::home_of(std::optional<MappedFile>& file) {
    if (!file->is_private || !is_on_local_disk(file->file.get())) return nullptr;
    const std::lock_guard lock(mutex_);
    std::erase_if(homes_, [](const auto& home) { return home.expired(); });
    for (const auto& known : homes_) {
        if (auto home = known.lock(); home && home->is_same_content(*file)) return home;
    }
    auto home = std::make_shared<const HomeFile>(*std::exchange(file, std::nullopt));
    homes_.push_back(home);
    return home;
}

/// As many pages as can lie in the file under `source`; those behind them are to be copied.
std::size_t MappedCopy::leave_in_file(Segment& segment, std::span<const std::byte> source,
                                      std::optional<MappedFile>& file) {
    if (!file || !may_leave_in_files()) return 0;
    const std::uint64_t offset_bytes = file->offset_bytes;
    const std::shared_ptr<const HomeFile> home = home_of(file);
    if (!home) return 0;
    // safetensors looks at the first element of each tensor: that of the next one lies behind this one.
    advise_single_touches(source.data(), source.size() + kTouchedNextBytes);
    return engine_.pager().set_home(segment, home, offset_bytes);
}

/// The stream of the file that `source` lies in, or nothing if it is better read through the mapping.
std::unique_ptr<MappedCopy::Stream> MappedCopy::stream_for(std::span<const std::byte> source,
                                                           std::optional<MappedFile> file) {
    if (!file) return nullptr;
    std::unique_ptr<Stream> stream;
    {
        const std::lock_guard lock(mutex_);
        stream = std::move(resting_);
    }
    if (stream && stream->is_of(*file)) return stream;
    // More than the source, and not for a file that is under way: the system reads some MiB around whatever is touched.
    const std::size_t behind_bytes = static_cast<std::size_t>(std::to_address(file->mapping.end()) - source.data());
    const std::size_t asked_bytes = std::max(source.size(), std::min(kAskedAheadBytes, behind_bytes));
    if (is_mostly_cached({source.data(), asked_bytes})) return nullptr;
    stream.reset();
    advise_few_touches(file->mapping);  // safetensors looks at the first element of each tensor
    try {
        return std::make_unique<Stream>(engine_, std::move(*file));
    } catch (const OutOfTierMemory&) {
        return nullptr;  // no page can make room for blocks
    }
}

void MappedCopy::copy_in(const std::shared_ptr<Segment>& segment, std::span<const std::byte> source) {
    std::optional<MappedFile> file;
    if (may_leave_in_files() || source.size() >= kMinDirectBytes) file = file_under(source);
    const std::uint64_t offset_bytes = file ? file->offset_bytes : 0;
    if (const std::size_t page_count = leave_in_file(*segment, source, file); page_count > 0) {
        const std::size_t left_bytes = std::min(page_count * segment->page_bytes(), source.size());
        engine_.counters.home_bytes.add(left_bytes);
        engine_.counters.copied_bytes.add(source.size() - left_bytes);
        copy_by_page(
            engine_, segment, source.size(),
            [&](std::size_t begin, std::span<std::byte> target) {
                std::memcpy(target.data(), source.data() + begin, target.size());
            },
            page_count);
        return;
    }
    engine_.counters.copied_bytes.add(source.size());
    if (source.size() < kMinDirectBytes) {
        // Nothing is read ahead of it: a large tensor behind it would be found in the page cache, and read the slow
        // way.
        torch_offload::copy_in(engine_, segment, source, c10::kCPU);
        return;
    }
    std::unique_ptr<Stream> stream = stream_for(source, std::move(file));
    if (!stream) {
        copy_through_mapping(engine_, segment, source);
        return;
    }
    advise_read_ahead(std::to_address(source.end()), kTouchedNextBytes);
    BlockStream& blocks = stream->blocks();
    const std::uint64_t direct_end_bytes = blocks.file().direct_end_bytes();
    copy_by_page(engine_, segment, source.size(), [&](std::size_t begin, std::span<std::byte> target) {
        const std::uint64_t left_bytes = direct_end_bytes - std::min(direct_end_bytes, offset_bytes + begin);
        const std::size_t direct_bytes = std::min<std::size_t>(target.size(), left_bytes);
        if (direct_bytes > 0) blocks.copy(offset_bytes + begin, target.first(direct_bytes));
        std::memcpy(target.data() + direct_bytes, source.data() + begin + direct_bytes, target.size() - direct_bytes);
    });
    engine_.counters.direct_bytes.add(source.size());
    {
        const std::lock_guard lock(mutex_);
        resting_.swap(stream);
    }
}

void MappedCopy::finish() noexcept {
    std::unique_ptr<Stream> stream;  // outlives the lock: it waits for its reads
    const std::lock_guard lock(mutex_);
    stream = std::move(resting_);
}

}  // namespace torch_offload
