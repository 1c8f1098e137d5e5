// The page of a shared budget in a file without a name. Layer device: includes base only.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/budget_ledger.h"

namespace torch_offload {

/// A file of memory that holds a LedgerPage, mapped. Other processes open it by its path while one of those that have
/// it lives; the system forgets it with the last of them.
/// Threads: any.
class LedgerFile {
public:
    /// A new one. `name` is what the system shows of it, in the directory of this process's files.
    /// Throws: InvalidArgument as LedgerPage::lay_out(); OffloadError if the system has no memory for it.
    static std::shared_ptr<LedgerFile> make(const std::string& name, std::size_t budget_bytes, std::size_t rank_count);
    /// That of another process. Throws: OffloadError if it cannot be opened, or is none.
    static std::shared_ptr<LedgerFile> open(const std::string& path);
    ~LedgerFile();
    LedgerFile(const LedgerFile&) = delete;
    LedgerFile& operator=(const LedgerFile&) = delete;

    LedgerPage& page() noexcept { return *page_; }

private:
    explicit LedgerFile(int file);

    int file_;
    LedgerPage* page_ = nullptr;
};

}  // namespace torch_offload
