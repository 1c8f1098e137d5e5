#include "storage/block_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "support/aligned_buffer.h"
#include "support/log_capture.h"
#include "support/refuse_system_call.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

/// Runs `body` in a forked child; its exit status, or minus the signal that ended it.
int run_in_child(const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body());
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// The errno of the TierIoError that `body` throws, whose message must name `directory`; 255 if it throws none.
int tier_error_of(const std::string& directory, const std::function<void()>& body) {
    try {
        body();
    } catch (const TierIoError& error) {
        return std::string(error.what()).find(directory) != std::string::npos ? error.error_number() : 254;
    } catch (const std::exception&) {
        return 253;
    }
    return 255;
}

std::string message_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

// kill -9 leaves no file. Method: a child opens, grows and writes a scratch file, then kills itself; while it lives
// and after, the directory is empty.
TEST(BlockFile, KillLeavesNothingBehind) {
    ScratchDirectory directory;
    const int status = run_in_child([&] {
        BlockFile file(directory.path());
        AlignedBuffer memory(kMiB);
        const Extent extent = file.allocate(memory.bytes().size());
        const auto offset = static_cast<off_t>(extent.offset_bytes);
        const ssize_t written_bytes = ::pwrite(file.file_descriptor(), memory.bytes().data(), kMiB, offset);
        if (written_bytes != static_cast<ssize_t>(kMiB)) return 1;
        if (!directory.is_empty()) return 2;
        ::kill(::getpid(), SIGKILL);
        return 3;
    });
    EXPECT_EQ(status, -SIGKILL);
    EXPECT_TRUE(directory.is_empty());
}

// The file is private, direct and really preallocated. Method: fstat and fcntl.
TEST(BlockFile, IsPrivateDirectAndPreallocated) {
    ScratchDirectory directory;
    LogCapture log(LogLevel::info);
    BlockFile file(directory.path());
    file.allocate(kMiB);
    struct stat status{};
    ASSERT_EQ(::fstat(file.file_descriptor(), &status), 0);
    EXPECT_EQ(status.st_nlink, 0u);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), file.size_bytes());
    if (log.lines().empty()) {  // a line says what this disk's filesystem lacks
        EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, file.size_bytes());
        EXPECT_NE(::fcntl(file.file_descriptor(), F_GETFL) & O_DIRECT, 0);
    }
    EXPECT_NE(::fcntl(file.file_descriptor(), F_GETFD) & FD_CLOEXEC, 0);
}

// Extents are disjoint, come back for use, and the file grows only when no hole fits. Method: count bytes.
TEST(BlockFile, SpaceIsUsedAgain) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    EXPECT_EQ(file.size_bytes(), 0u);
    const Extent first = file.allocate(kMiB);
    const Extent second = file.allocate(kMiB);
    EXPECT_NE(first.offset_bytes, second.offset_bytes);
    EXPECT_EQ(file.allocated_bytes(), 2 * kMiB);
    const std::uint64_t size_bytes = file.size_bytes();
    file.free(first);
    EXPECT_EQ(file.allocate(kMiB), first);
    EXPECT_EQ(file.size_bytes(), size_bytes);
    const Extent large = file.allocate(100 * kMiB);
    EXPECT_EQ(large.size_bytes, 100 * kMiB);
    EXPECT_GE(file.size_bytes(), size_bytes + 100 * kMiB);
    for (const Extent& extent : {first, second, large}) file.free(extent);
    EXPECT_EQ(file.allocated_bytes(), 0u);
}

// A double or foreign free is logged and changes nothing. Method: free twice, free past the end.
TEST(BlockFile, WrongFreeIsLogged) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    const Extent extent = file.allocate(kMiB);
    file.free(extent);
    LogCapture log(LogLevel::error);
    file.free(extent);
    file.free({.offset_bytes = file.size_bytes(), .size_bytes = kMiB});
    EXPECT_NE(log.lines().find("freed twice"), std::string::npos);
    EXPECT_NE(log.lines().find("outside the file"), std::string::npos);
    EXPECT_EQ(file.allocated_bytes(), 0u);
}

// Sizes that direct I/O cannot serve are refused. Method: 0 and half a sector.
TEST(BlockFile, OddSizesAreRefused) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    EXPECT_THROW(file.allocate(0), InvalidArgument);
    EXPECT_THROW(file.allocate(kSectorBytes / 2), InvalidArgument);
}

// Threads that allocate and free at once get disjoint extents. Method: four threads mark the extents they hold.
TEST(BlockFile, AllocatesFromAnyThread) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    constexpr std::size_t kSlots = 512 * kMiB / kSectorBytes;
    std::vector<std::atomic<int>> holders(kSlots);
    std::atomic<int> clash_count{0};
    const auto work = [&](int me) {
        std::vector<Extent> held;
        for (int round = 0; round < 400; ++round) {
            const Extent extent = file.allocate((1 + static_cast<std::size_t>((round * me) % 7)) * 16 * kSectorBytes);
            if (holders[extent.offset_bytes / kSectorBytes].exchange(me) != 0) ++clash_count;
            held.push_back(extent);
            if (held.size() < 50) continue;
            for (const Extent& old : held) {
                holders[old.offset_bytes / kSectorBytes] = 0;
                file.free(old);
            }
            held.clear();
        }
        for (const Extent& old : held) file.free(old);
    };
    std::vector<std::thread> threads;
    for (int i = 1; i <= 4; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(clash_count.load(), 0);
    EXPECT_EQ(file.allocated_bytes(), 0u);
}

// A directory that is missing, is a file or lies below a file is the user's mistake. Method: name them.
TEST(BlockFile, WrongDirectoriesAreInvalid) {
    ScratchDirectory directory;
    const std::string file = directory.path() + "/file";
    std::ofstream(file) << "x";
    EXPECT_NE(message_of([&] { BlockFile{directory.path() + "/missing"}; }).find("does not exist"), std::string::npos);
    EXPECT_NE(message_of([&] { BlockFile{file}; }).find("not a directory"), std::string::npos);
    EXPECT_NE(message_of([&] { BlockFile{file + "/below"}; }).find("does not exist"), std::string::npos);
}

// Memory is no disk: tmpfs is refused and the message says why. Method: /dev/shm, which is tmpfs on Linux.
TEST(BlockFile, TmpfsIsRefused) {
    struct statfs filesystem{};
    if (::statfs("/dev/shm", &filesystem) != 0 || filesystem.f_type != 0x01021994) GTEST_SKIP() << "no tmpfs here";
    const std::string message = message_of([] { BlockFile{"/dev/shm"}; });
    EXPECT_NE(message.find("/dev/shm"), std::string::npos);
    EXPECT_NE(message.find("tmpfs"), std::string::npos);
    EXPECT_NE(message.find("name a directory on a disk"), std::string::npos);
}

// Without permission to write there is a typed error. Method: a child without privileges and a directory of mode 0500.
TEST(BlockFile, NoPermissionIsATierError) {
    ScratchDirectory directory;
    ASSERT_EQ(::chmod(directory.path().c_str(), 0555), 0);
    const int status = run_in_child([&] {
        if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 252;
        return tier_error_of(directory.path(), [&] { BlockFile{directory.path()}; });
    });
    EXPECT_EQ(status, EACCES);
}

// A read-only filesystem is a typed error. Method: a child in mount and user namespaces of its own makes it read-only.
TEST(BlockFile, ReadOnlyFilesystemIsATierError) {
    constexpr int kNotPermitted = 252;
    ScratchDirectory directory;
    const int status = run_in_child([&] {
        const char* path = directory.path().c_str();
        if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return kNotPermitted;
        if (::mount("", "/", nullptr, MS_PRIVATE | MS_REC, nullptr) != 0) return kNotPermitted;
        if (::mount(path, path, nullptr, MS_BIND, nullptr) != 0) return kNotPermitted;
        if (::mount("", path, nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr) != 0) return kNotPermitted;
        return tier_error_of(directory.path(), [&] { BlockFile{directory.path()}; });
    });
    if (status == kNotPermitted) GTEST_SKIP() << "no mount namespace for this user";
    EXPECT_EQ(status, EROFS);
}

// A full disk is a typed error before anything is filled, and the file stays usable. Method: ask for more than is free.
TEST(BlockFile, MoreThanTheDiskHasIsENOSPC) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    const Extent before = file.allocate(kMiB);
    struct statvfs disk{};
    ASSERT_EQ(::statvfs(directory.path().c_str(), &disk), 0);
    const std::size_t wanted_bytes = round_up(2 * disk.f_blocks * disk.f_frsize, kSectorBytes);
    EXPECT_EQ(tier_error_of(directory.path(), [&] { file.allocate(wanted_bytes); }), ENOSPC);
    try {
        file.allocate(wanted_bytes);
    } catch (const TierIoError& error) {
        EXPECT_NE(std::string(error.what()).find(concat(wanted_bytes)), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("larger disk"), std::string::npos);
    }
    EXPECT_EQ(file.allocated_bytes(), kMiB);
    file.free(before);
    EXPECT_EQ(file.allocate(kMiB), before);
}

// When the kernel refuses a large step, a small one is tried, then there is a typed error and the file stays usable.
// Method: a child whose file size limit is 3 MiB, so that fallocate itself fails.
TEST(BlockFile, RefusedGrowthIsATierError) {
    ScratchDirectory directory;
    const int status = run_in_child([&] {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{3 * kMiB, 3 * kMiB};
        if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 252;
        BlockFile file(directory.path());
        const Extent first = file.allocate(2 * kMiB);
        const int error = tier_error_of(directory.path(), [&] { file.allocate(2 * kMiB); });
        if (file.size_bytes() != 2 * kMiB) return 251;
        file.allocate(kMiB);
        file.free(first);
        return file.allocate(2 * kMiB) == first ? error : 250;
    });
    EXPECT_EQ(status, EFBIG);
}

// A filesystem without nameless files gets one that is unlinked at once. Method: O_TMPFILE is refused.
TEST(BlockFile, WithoutTmpfileItIsUnlinked) {
    ScratchDirectory directory;
    bool is_refused = false;
    in_own_thread([&] {
        is_refused = refuse_system_call({__NR_openat, EOPNOTSUPP, 2, O_TMPFILE, O_TMPFILE});
        if (!is_refused) return;
        BlockFile file(directory.path());
        file.allocate(kMiB);
        EXPECT_TRUE(directory.is_empty());
        struct stat status{};
        ASSERT_EQ(::fstat(file.file_descriptor(), &status), 0);
        EXPECT_EQ(status.st_nlink, 0u);
        EXPECT_EQ(status.st_mode & 0777, 0600u);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
}

// A filesystem without direct I/O is used through the page cache, with a log line. Method: O_DIRECT is refused.
TEST(BlockFile, WithoutDirectIoItIsBuffered) {
    ScratchDirectory directory;
    bool is_refused = false;
    LogCapture log(LogLevel::info);
    in_own_thread([&] {
        is_refused = refuse_system_call({__NR_fcntl, EINVAL, 1, ~0u, F_SETFL});
        if (!is_refused) return;
        BlockFile file(directory.path());
        file.allocate(kMiB);
        EXPECT_EQ(::fcntl(file.file_descriptor(), F_GETFL) & O_DIRECT, 0);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_NE(log.lines().find("no direct I/O"), std::string::npos);
}

// Nor is one that takes the flag and then refuses transfers. Method: writes, or reads, of one sector are refused.
TEST(BlockFile, WithoutDirectTransfersItIsBuffered) {
    for (const long number : {__NR_pwrite64, __NR_pread64}) {
        ScratchDirectory directory;
        bool is_refused = false;
        LogCapture log(LogLevel::info);
        in_own_thread([&] {
            is_refused = refuse_system_call({static_cast<std::uint32_t>(number), EINVAL, 2, ~0u, kSectorBytes});
            if (!is_refused) return;
            BlockFile file(directory.path());
            file.allocate(kMiB);
            EXPECT_EQ(::fcntl(file.file_descriptor(), F_GETFL) & O_DIRECT, 0);
        });
        if (!is_refused) GTEST_SKIP() << "no seccomp here";
        EXPECT_NE(log.lines().find("no direct I/O"), std::string::npos) << number;
    }
}

// A disk that cannot be written is refused at once. Method: writes of one sector fail.
TEST(BlockFile, DiskThatFailsIsRefused) {
    ScratchDirectory directory;
    bool is_refused = false;
    int error = 0;
    in_own_thread([&] {
        is_refused = refuse_system_call({__NR_pwrite64, EIO, 2, ~0u, kSectorBytes});
        if (is_refused) error = tier_error_of(directory.path(), [&] { BlockFile(directory.path()); });
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_EQ(error, EIO);
    EXPECT_TRUE(directory.is_empty());
}

// A filesystem without fallocate gets its length set, with a log line. Method: fallocate is refused.
TEST(BlockFile, WithoutFallocateTheLengthIsSet) {
    ScratchDirectory directory;
    bool is_refused = false;
    LogCapture log(LogLevel::info);
    in_own_thread([&] {
        is_refused = refuse_system_call({.number = __NR_fallocate, .error = EOPNOTSUPP});
        if (!is_refused) return;
        BlockFile file(directory.path());
        file.allocate(100 * kMiB);
        struct stat status{};
        ASSERT_EQ(::fstat(file.file_descriptor(), &status), 0);
        EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), file.size_bytes());
        EXPECT_GE(file.size_bytes(), 100 * kMiB);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
    EXPECT_NE(log.lines().find("no preallocation"), std::string::npos);
}

// A disk that fills up shows as ENOSPC when the file is opened and when it grows. Method: fallocate says so.
TEST(BlockFile, FullDiskIsENOSPC) {
    ScratchDirectory directory;
    bool is_refused = false;
    in_own_thread([&] {
        BlockFile file(directory.path());
        const Extent before = file.allocate(kMiB);
        const std::uint64_t size_bytes = file.size_bytes();
        is_refused = refuse_system_call({.number = __NR_fallocate, .error = ENOSPC});
        if (!is_refused) return;
        EXPECT_EQ(tier_error_of(directory.path(), [&] { file.allocate(100 * kMiB); }), ENOSPC);
        EXPECT_EQ(tier_error_of(directory.path(), [&] { BlockFile{directory.path()}; }), ENOSPC);
        EXPECT_EQ(file.size_bytes(), size_bytes);
        file.free(before);
        EXPECT_EQ(file.allocate(kMiB), before);
    });
    if (!is_refused) GTEST_SKIP() << "no seccomp here";
}

std::string full_message_of(const std::function<void()>& fail) {
    try {
        fail();
    } catch (const TierIoError& error) {
        EXPECT_EQ(error.error_number(), ENOSPC);
        return error.what();
    }
    ADD_FAILURE() << "there was room";
    return {};
}

// A file stays below its cap, of which not a sector is lost, and then goes on with what is freed. Method: a cap that is
// no multiple of what the file grows by.
TEST(BlockFile, CapIsAFullDisk) {
    ScratchDirectory directory;
    constexpr std::uint64_t kCap = 10 * kMiB + kSectorBytes;
    BlockFile file(directory.path(), {.max_bytes = kCap});
    std::vector<Extent> extents;
    for (int i = 0; i < 10; ++i) extents.push_back(file.allocate(kMiB));
    EXPECT_EQ(file.allocate(kSectorBytes).offset_bytes, 10 * kMiB);
    EXPECT_EQ(file.size_bytes(), kCap);
    const std::string message = full_message_of([&] { file.allocate(kMiB); });
    EXPECT_NE(message.find(concat("by ", kMiB, " bytes")), std::string::npos) << message;
    EXPECT_NE(message.find(concat("it may have ", kCap, "; give a larger max_spill")), std::string::npos) << message;
    EXPECT_EQ(file.size_bytes(), kCap);
    file.free(extents[3]);
    EXPECT_EQ(file.allocate(kMiB), extents[3]);
}

// What is kept free counts as full, for others to write. Method: more than is free is kept, then half of it.
TEST(BlockFile, FloorIsAFullDisk) {
    ScratchDirectory directory;
    struct statvfs disk{};
    ASSERT_EQ(::statvfs(directory.path().c_str(), &disk), 0);
    const std::uint64_t free_bytes = static_cast<std::uint64_t>(disk.f_bavail) * disk.f_frsize;
    BlockFile none(directory.path(), {.keep_free_bytes = free_bytes + kGiB});
    const std::string message = full_message_of([&] { none.allocate(kSectorBytes); });
    EXPECT_NE(message.find(concat(free_bytes + kGiB, " are kept free; free space there, lower keep_free")),
              std::string::npos)
        << message;
    EXPECT_EQ(none.size_bytes(), 0u);
    BlockFile large(directory.path(), {.keep_free_bytes = free_bytes / 2});
    EXPECT_EQ(large.allocate(kMiB).size_bytes, kMiB);
    const std::size_t wanted_bytes = round_up(free_bytes / 4 * 3, kSectorBytes);
    full_message_of([&] { large.allocate(wanted_bytes); });
    EXPECT_LE(large.size_bytes(), 64 * kMiB + kMiB);
}

// A file is hardly longer than what lies in it, and grows in few steps. Method: extents of 64 KiB up to 256 MiB.
TEST(BlockFile, GrowsByASmallPartOfItself) {
    ScratchDirectory directory;
    BlockFile file(directory.path());
    std::size_t used_bytes = 0;
    std::set<std::uint64_t> sizes;
    while (used_bytes < 256 * kMiB) {
        used_bytes += file.allocate(64 * kKiB).size_bytes;
        sizes.insert(file.size_bytes());
        ASSERT_LE(file.size_bytes(), used_bytes + std::max<std::size_t>(kMiB, used_bytes / 32));
    }
    EXPECT_LE(sizes.size(), 128u);
}

}  // namespace
}  // namespace torch_offload::test
