// What an SSD store says: of its transfers, and why one failed.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "pager/ssd_store.h"

namespace torch_offload {
namespace {

constexpr const char* kChangedHome =
    "the file was changed after its weights were loaded, and the page is lost: overwrite the tensor, or load the model "
    "again, with checkpoint_pages=\"copy\" if something writes to its files";

}  // namespace

/// Where a read comes from, or a write goes to.
std::string SsdStore::place_of(const Transfer& transfer) const {
    const bool is_read = transfer.request.direction == IoDirection::read;
    if (const HomePlace& home = transfer.stored->home; is_read && home) {
        return concat("offset ", home.offset_bytes, " of ", home.file->path());
    }
    const Extent& extent = is_read ? *transfer.stored->extent : *transfer.target;
    return concat("offset ", extent.offset_bytes, " of the scratch file in ", file_.directory(extent));
}

/// Whether it reads from a file that somebody has written to since.
bool SsdStore::has_changed_home(const Transfer& transfer) const noexcept {
    const HomePlace& home = transfer.stored->home;
    return home && !home.file->is_unchanged();
}

std::string SsdStore::describe(const Transfer& transfer, Clock::time_point now) const {
    const bool is_read = transfer.request.direction == IoDirection::read;
    return concat("ssd tier: ", is_read ? "reading" : "writing", " page ", transfer.segment->index_of(*transfer.page),
                  " of ", transfer.segment->label, " (", place_of(transfer), ") has taken ",
                  std::chrono::duration<double>(now - transfer.submitted).count(), " s");
}

std::string SsdStore::under_way() const {
    const std::size_t reads = reads_in_flight();
    return concat(reads, " reads and ", std::max(in_flight(), reads) - reads, " writes are under way");
}

/// Of the transfers that have begun, and how many there are of all.
std::vector<std::string> SsdStore::describe_oldest(std::size_t most) const {
    std::vector<const Transfer*> begun;
    const auto collect = [&](const Transfer& transfer) {
        if (transfer.submitted != Clock::time_point{}) begun.push_back(&transfer);
    };
    for (const Transfers* transfers : {&submitted_, &ready_reads_, &ready_writes_}) {
        std::ranges::for_each(*transfers, collect);
    }
    std::ranges::stable_sort(begun, {}, &Transfer::submitted);
    begun.resize(std::min(begun.size(), most));
    std::vector<std::string> lines;
    const auto now = Clock::now();
    for (const Transfer* transfer : begun) lines.push_back(describe(*transfer, now));
    if (in_flight() == 0) return lines;
    lines.push_back(
        concat("ssd tier: ", under_way(), ", ", delayed_.size(), " of them failed and wait to be tried again"));
    return lines;
}

/// If there is no memory for the lines, there are none.
void SsdStore::answer_inquiry() noexcept {
    const std::size_t most = inquiry_.wanted();
    if (most == 0) return;
    std::vector<std::string> lines;
    try {
        lines = describe_oldest(most);
    } catch (const std::bad_alloc&) {
        lines.clear();
    }
    inquiry_.answer(std::move(lines));
}

std::exception_ptr SsdStore::write_error(const Transfer& transfer, const char* why, int error_number) const noexcept {
    return exception_from([&] {
        const std::string place =
            transfer.target ? concat(" to the scratch file in ", file_.directory(*transfer.target)) : std::string();
        return TierIoError(
            concat("ssd tier: writing page ", transfer.segment->index_of(*transfer.page), " of ",
                   transfer.segment->label, place, " failed: ", why, "; nothing is lost, the page stays in memory"),
            error_number);
    });
}

std::string SsdStore::failed_read(const Transfer& transfer) const {
    return concat("ssd tier: reading page ", transfer.segment->index_of(*transfer.page), " of ",
                  transfer.segment->label, " at ", place_of(transfer), " failed: ");
}

std::exception_ptr SsdStore::read_error(const Transfer& transfer, int error_number) const noexcept {
    return exception_from([&] {
        const char* const what_next = has_changed_home(transfer)
                                          ? kChangedHome
                                          : "nothing is lost if the disk comes back: the next access reads it again";
        return TierIoError(concat(failed_read(transfer), std::strerror(error_number), "; ", what_next), error_number);
    });
}

/// The bytes came, and are not the ones that were written.
std::exception_ptr SsdStore::corruption_error(const Transfer& transfer) const noexcept {
    const char* const why = has_changed_home(transfer)
                                ? kChangedHome
                                : "checksum mismatch, also when read again; the page is lost: overwrite the tensor, or "
                                  "restart from the last checkpoint on a sound disk";
    return exception_from([&] { return CorruptPage(concat(failed_read(transfer), why)); });
}

}  // namespace torch_offload
