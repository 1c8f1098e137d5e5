// A disk that becomes full, at any size: the training meets errors that name it, nothing is lost, and it goes on
// exactly once there is space.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/units.h"
#include "fault/case_runner.h"
#include "fault/injector.h"
#include "fault/training_case.h"
#include "storage/file_descriptor.h"
#include "support/pager_fixture.h"
#include "support/scratch_directory.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kLayers = 16;  // whose state takes more than the largest of the sizes

/// A filesystem of its own in a file, where this user may mount one.
class SmallDisk {
public:
    SmallDisk() {
        const std::string image = scratch_.path() + "/image";
        const std::string command = concat("truncate -s 64M ", image, " && mkfs.ext4 -q -F -m 0 ", image, " && mkdir ",
                                           directory(), " && mount -o loop ", image, " ", directory());
        is_mounted_ = std::system((command + " 2> /dev/null").c_str()) == 0;
    }
    ~SmallDisk() {
        if (is_mounted_ && std::system(concat("umount ", directory()).c_str()) != 0) ADD_FAILURE() << "still mounted";
    }
    SmallDisk(const SmallDisk&) = delete;
    SmallDisk& operator=(const SmallDisk&) = delete;

    bool is_mounted() const noexcept { return is_mounted_; }
    std::string directory() const { return scratch_.path() + "/disk"; }

private:
    ScratchDirectory scratch_;
    bool is_mounted_ = false;
};

/// Takes what is free on a disk but `left_bytes`, until it goes.
class Filler {
public:
    Filler(const std::string& directory, std::size_t left_bytes)
        : file_(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)) {
        struct statvfs status{};
        if (!file_ || ::statvfs(directory.c_str(), &status) != 0) throw std::runtime_error("the disk cannot be filled");
        const auto free_bytes = static_cast<off_t>(status.f_bavail * status.f_frsize);
        const off_t taken_bytes = free_bytes - static_cast<off_t>(left_bytes);
        if (::posix_fallocate(file_.get(), 0, taken_bytes) != 0) throw std::runtime_error("the disk is too full");
    }

private:
    FileDescriptor file_;
};

void train_on_full_disk(Report& report, const SmallDisk& disk, std::size_t left_bytes, std::uint64_t seed) {
    std::optional<Filler> filler;
    TrainingCase trained;
    trained.seed = seed;
    trained.layers = kLayers;
    trained.options = [&] {
        PagerOptions options = small_options();
        options.transfer_limits.timeout = TransferLimits{}.timeout;
        if (disk.is_mounted()) options.directories = {disk.directory()};
        return options;
    };
    trained.make_engine = [] { return make_io_engine(IoEngineKind::automatic, 8); };
    trained.begins_with_the_pager = true;
    trained.begin_fault = [&] {
        if (disk.is_mounted()) {
            filler.emplace(disk.directory(), left_bytes);
        } else {
            limit_files_to(static_cast<std::int64_t>(left_bytes));
        }
    };
    trained.end_fault = [&] {
        filler.reset();
        limit_files_to(-1);
    };
    train(trained, report);
    report.injected = times_full() + report.raised;
    const bool is_named = std::string(report.text.data()).find(std::strerror(ENOSPC)) != std::string::npos;
    if (report.raised > 0 && !is_named)
        report.fail(Verdict::untyped, concat("an error of something else: ", report.text.data()));
}

// Method: 40 sizes of what is left on the disk, of a filesystem in a file or, where none can be mounted, of files.
TEST(Fault, FullDisk) {
    CaseRunner runner(10);
    const SmallDisk disk;
    RecordProperty("disk", disk.is_mounted() ? "ext4 in a file" : "a limit on files");
    const std::uint64_t seeds_of_a_size = how_many(1, 10);
    for (std::uint64_t seed = base_seed(); seed < base_seed() + seeds_of_a_size; ++seed) {
        for (std::size_t pages = 1; pages <= 40; ++pages) {
            runner.run(concat(pages, " pages left, seed ", seed),
                       [&](Report& report) { train_on_full_disk(report, disk, pages * kPageBytes, seed); });
        }
    }
    runner.finish(40 * seeds_of_a_size);
}

}  // namespace
}  // namespace torch_offload::test
