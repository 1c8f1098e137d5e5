#include "device/address_space_shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/check.h"

namespace torch_offload {

/// Owns the descriptor from here on. Whoever maps it could end others by making it shorter: it keeps its size.
LedgerFile::LedgerFile(int file) : file_(file) {
    struct stat status{};
    const bool is_whole = ::fstat(file_, &status) == 0 && status.st_size == static_cast<off_t>(sizeof(LedgerPage));
    const int seals = ::fcntl(file_, F_GET_SEALS);
    const bool is_sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
    void* const mapped = is_whole && is_sealed
                             ? ::mmap(nullptr, sizeof(LedgerPage), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0)
                             : MAP_FAILED;
    if (mapped == MAP_FAILED) {
        ::close(file_);
        throw OffloadError("the ledger of a shared budget cannot be mapped: it is none, or there is no memory");
    }
    page_ = static_cast<LedgerPage*>(mapped);
}

LedgerFile::~LedgerFile() {
    ::munmap(page_, sizeof(LedgerPage));
    ::close(file_);
}

std::shared_ptr<LedgerFile> LedgerFile::make(const std::string& name, std::size_t budget_bytes,
                                             std::size_t rank_count) {
    const int file = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    OFFLOAD_CHECK(file >= 0, OffloadError, "no ledger of a shared budget can be made: ", std::strerror(errno));
    const bool is_made =
        ::ftruncate(file, sizeof(LedgerPage)) == 0 && ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
    if (!is_made) {
        const int error = errno;
        ::close(file);
        throw OffloadError(concat("no ledger of a shared budget can be made: ", std::strerror(error)));
    }
    std::shared_ptr<LedgerFile> made(new LedgerFile(file));
    made->page().lay_out(budget_bytes, rank_count);
    return made;
}

std::shared_ptr<LedgerFile> LedgerFile::open(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    OFFLOAD_CHECK(file >= 0, OffloadError, "the ledger of a shared budget, ", path,
                  ", cannot be opened: ", std::strerror(errno));
    std::shared_ptr<LedgerFile> opened(new LedgerFile(file));
    OFFLOAD_CHECK(opened->page().quantum_bytes.load() != 0, OffloadError, "the ledger of a shared budget, ", path,
                  ", is empty");
    return opened;
}

}  // namespace torch_offload
