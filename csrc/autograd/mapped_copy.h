// Copying memory into pages, also such as lies in a mapped file. Layer autograd.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "pager/pager.h"
#include "storage/block_stream.h"
#include "storage/home_file.h"

namespace torch_offload {

class Engine;

/// Copies page by page, so that the pager can let pages go while the next ones are copied. `source_device`: where the
/// source is. Throws: what a pin throws.
void copy_in(Engine& engine, const std::shared_ptr<Segment>& segment, std::span<const std::byte> source,
             c10::Device source_device);

/// Makes pages of memory that may be a mapped file. Where it is, on a disk of this machine, they lie in the file until
/// they are written, and nothing is copied. Otherwise, or if the engine is to copy: tensors are mostly loaded in the
/// order of the file: what follows one is read meanwhile, past the page cache and into huge pages, several times as
/// fast as through the mapping. Memory that is no such file, or lies in the page cache already, is read through the
/// mapping.
/// Threads: any; each has a file of its own under way.
class MappedCopy {
public:
    explicit MappedCopy(Engine& engine) noexcept : engine_(engine) {}
    MappedCopy(const MappedCopy&) = delete;
    MappedCopy& operator=(const MappedCopy&) = delete;

    /// Throws: what a pin throws; TierIoError if the file cannot be read. Pre: the segment is new; pages and source are
    /// the host's.
    void copy_in(const std::shared_ptr<Segment>& segment, std::span<const std::byte> source);

    /// Gives back the memory that waits for the next tensor of a file. Call it when loading has ended.
    void finish() noexcept;

private:
    /// A file under way, and the memory of the budget that its blocks lie in.
    class Stream {
    public:
        Stream(Engine& engine, MappedFile file);
        ~Stream();
        Stream(const Stream&) = delete;
        Stream& operator=(const Stream&) = delete;

        bool is_of(const MappedFile& file) const noexcept;
        BlockStream& blocks() noexcept { return *blocks_; }

    private:
        Engine& engine_;
        std::thread::id thread_ = std::this_thread::get_id();
        std::span<std::byte> memory_;
        std::unique_ptr<BlockStream> blocks_;
    };

    bool may_leave_in_files() const noexcept;
    std::shared_ptr<const HomeFile> home_of(std::optional<MappedFile>& file);
    std::size_t leave_in_file(Segment& segment, std::span<const std::byte> source, std::optional<MappedFile>& file);
    std::unique_ptr<Stream> stream_for(std::span<const std::byte> source, std::optional<MappedFile> file);

    Engine& engine_;
    std::mutex mutex_;                 // guards the next two; never held during I/O
    std::unique_ptr<Stream> resting_;  // between two tensors
    std::vector<std::weak_ptr<const HomeFile>> homes_;
};

}  // namespace torch_offload
