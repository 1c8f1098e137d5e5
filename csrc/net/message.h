// What a client and a store of pages say to each other: a header of fixed size, and a page or a text behind it.
// Layer net: includes base, storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace torch_offload {

/// Beside each: who says it, and what of the header it uses.
enum class MessageKind : std::uint16_t {
    hello = 1,  // client, first: page_bytes, the largest that it will send; a text: what its kernels' bits depend on
    welcome,    // store: client, the number that it is known by; version, a number of the store's own;
                // segment_bytes, its memory; page_bytes, of all pages of an update at most; a text: why that is 0
    refused,    // store, and it hangs up: a text
    read,       // client: request, segment, role, page, version
    page,       // store: request; the page's bytes
    write,      // client: request, segment, role, segment_bytes, page_bytes, page, version; the bytes when granted
    granted,    // store: request; there is room for the bytes
    bytes,      // client: request, version, body_checksum; the page's bytes
    stored,     // store: request
    damaged,    // store: request; what came has another checksum
    failed,     // store: request, error_number; a text. What was asked for may be asked for again
    lost,       // store: the same, and the page has no bytes any more
    forget,     // client: segment
    update,     // client: request, page, count of members; a MemberPage for each, and the operators to run on them
    updated,    // store: request, count of operators that ran; the new checksum of each member, and a text: why no more
                // of them did
    pass,       // client: count, the program that a pass of begins
    step,       // client: a training step has ended
};

inline constexpr std::uint64_t kNoRole = UINT32_MAX;  // of what is not known again

/// Both sides have the same byte order, or `magic` tells. The first two numbers are the same in every protocol.
struct MessageHeader {
    static constexpr std::uint32_t kMagic = 0x53504F54;  // "TOPS"
    static constexpr std::uint16_t kProtocol = 3;

    std::uint32_t magic = kMagic;
    std::uint16_t protocol = kProtocol;
    MessageKind kind{};
    std::uint32_t request = 0;  // below kMaxRequests; answers have that of their question
    std::int32_t error_number = 0;
    std::uint64_t client = 0;
    std::uint64_t segment = 0;
    std::uint64_t role = kNoRole;  // of the segment, by which it is known again in the next pass
    std::uint64_t segment_bytes = 0;
    std::uint64_t page_bytes = 0;
    std::uint64_t page = 0;
    std::uint64_t version = 0;
    std::uint64_t count = 0;
    std::uint64_t body_bytes = 0;
    std::uint64_t body_checksum = 0;  // of a page or an update: page_checksum() with client, segment and page, version
    std::uint64_t header_checksum = 0;
};
static_assert(sizeof(MessageHeader) == 104 && std::has_unique_object_representations_v<MessageHeader>);

/// A page that an update uses, all of which have the same number in their segments.
struct MemberPage {
    std::uint64_t segment = 0;
    std::uint64_t role = kNoRole;
    std::uint64_t segment_bytes = 0;
    std::uint64_t page_bytes = 0;
    std::uint64_t version = 0;       // that it has afterwards
    std::uint64_t is_worthless = 0;  // 1: nobody reads it any more
};
static_assert(sizeof(MemberPage) == 48 && std::has_unique_object_representations_v<MemberPage>);

inline constexpr std::uint32_t kMaxRequests = 96;  // of one client at a time
inline constexpr std::size_t kMaxTextBytes = 1024;
inline constexpr std::size_t kMaxMembers = 16;  // whose checksums leave room for a text
inline constexpr std::size_t kMaxUpdateBytes = std::size_t{256} << 10;

/// Of everything before it.
std::uint64_t checksum_of(const MessageHeader& header) noexcept;

/// Of a page that has the header's client, segment, page and version.
std::uint64_t checksum_of_body(const MessageHeader& header, std::span<const std::byte> body) noexcept;

}  // namespace torch_offload
