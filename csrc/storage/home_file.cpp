#include "storage/home_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>

namespace torch_offload {

bool HomeFile::is_unchanged() const noexcept {
    struct stat status{};
    if (::fstat(file_.file.get(), &status) != 0) return false;
    return static_cast<std::uint64_t>(status.st_size) == file_.size_bytes && modified_ns(status) == file_.modified_ns;
}

bool HomePlace::can_be_read(std::size_t page_bytes) const noexcept {
    return round_up(offset_bytes + page_bytes, std::uint64_t{kSectorBytes}) <= file->direct_end_bytes();
}

HomeRead::HomeRead(const HomePlace& place, std::size_t page_bytes, std::span<std::byte> slot)
    : file_descriptor_(place.file->file_descriptor()),
      begin_bytes_(place.offset_bytes / kSectorBytes * kSectorBytes),
      lead_bytes_(place.offset_bytes % kSectorBytes),
      page_bytes_(page_bytes),
      slot_(slot) {
    if (lead_bytes_ + page_bytes_ > slot_.size()) tail_ = std::make_unique<Sector>();
}

void HomeRead::fill(IoRequest& request) const noexcept {
    request.file_descriptor = file_descriptor_;
    request.offset_bytes = begin_bytes_;
    request.buffer = slot_.first(std::min(slot_.size(), round_up(lead_bytes_ + page_bytes_, kSectorBytes)));
    if (tail_) request.tail = tail_->bytes;
}

void HomeRead::put_in_place() noexcept {
    const std::size_t in_slot_bytes = std::min(page_bytes_, slot_.size() - lead_bytes_);
    if (lead_bytes_ > 0) std::memmove(slot_.data(), slot_.data() + lead_bytes_, in_slot_bytes);
    if (tail_) std::memcpy(slot_.data() + in_slot_bytes, tail_->bytes, page_bytes_ - in_slot_bytes);
    std::memset(slot_.data() + page_bytes_, 0, slot_.size() - page_bytes_);
}

}  // namespace torch_offload
