#include "net/message.h"

#include "storage/checksum.h"

namespace torch_offload {
namespace {

constexpr int kPageBits = 24;  // of a page's number within its segment

}  // namespace

std::uint64_t checksum_of(const MessageHeader& header) noexcept {
    return page_checksum(std::as_bytes(std::span(&header, 1)).first(offsetof(MessageHeader, header_checksum)), {});
}

std::uint64_t checksum_of_body(const MessageHeader& header, std::span<const std::byte> body) noexcept {
    return page_checksum(body, {header.client, header.segment << kPageBits | header.page, header.version});
}

}  // namespace torch_offload
