#include "net/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace torch_offload {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(MessageHeader);
constexpr std::size_t kPrefixBytes = offsetof(MessageHeader, kind);  // the same in every protocol

bool may_try_again(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Channel::Arrival Channel::receive() {
    if (incoming_done_ < kHeaderBytes) {
        const std::span<std::byte> header = std::as_writable_bytes(std::span(&incoming_, 1));
        incoming_done_ += receive_some(header.subspan(incoming_done_));
        if (incoming_done_ >= kPrefixBytes) check_header();
        if (incoming_done_ < kHeaderBytes) return Arrival::nothing;
        if (incoming_.body_bytes > 0) return Arrival::header;
    } else {
        const std::size_t body_done = incoming_done_ - kHeaderBytes;
        incoming_done_ += receive_some(place_.subspan(body_done));
        if (incoming_done_ - kHeaderBytes < place_.size()) return Arrival::nothing;
    }
    incoming_done_ = 0;
    return Arrival::message;
}

/// As much of it as has come.
void Channel::check_header() const {
    if (incoming_.magic != MessageHeader::kMagic)
        fail("what it says is not the language of torch-offload store", EPROTO);
    if (incoming_.protocol != MessageHeader::kProtocol) {
        fail(concat("it speaks protocol ", incoming_.protocol, " of torch-offload store, and this side ",
                    MessageHeader::kProtocol, "; install the same version of torch_offload on both sides"),
             EPROTO);
    }
    if (incoming_done_ == kHeaderBytes && incoming_.header_checksum != checksum_of(incoming_)) {
        fail("the header of a message has another checksum than was sent", EBADMSG);
    }
}

/// 0: nothing has come.
std::size_t Channel::receive_some(std::span<std::byte> place) {
    const ssize_t count = ::recv(socket_.get(), place.data(), place.size(), 0);
    if (count > 0) {
        received_bytes_ += static_cast<std::uint64_t>(count);
        return static_cast<std::size_t>(count);
    }
    if (count == 0) fail("it has hung up", ECONNRESET);
    if (!may_try_again(errno)) fail(std::strerror(errno), errno);
    return 0;
}

void Channel::discard() {
    std::array<std::byte, 4096> nowhere;
    receive_some(nowhere);
}

void Channel::send(MessageHeader header, std::span<const std::byte> body) noexcept {
    outgoing_ = header;
    outgoing_.body_bytes = body.size();
    outgoing_.header_checksum = checksum_of(outgoing_);
    outgoing_body_ = body;
    outgoing_bytes_ = kHeaderBytes + body.size();
    outgoing_done_ = 0;
}

void Channel::flush() {
    if (!is_sending()) return;
    const std::span<const std::byte> header = std::as_bytes(std::span(&outgoing_, 1));
    const std::span<const std::byte> left_header = header.subspan(std::min(outgoing_done_, kHeaderBytes));
    const std::span<const std::byte> left_body = outgoing_body_.last(left_to_send() - left_header.size());
    const auto piece_of = [](std::span<const std::byte> bytes) {
        return iovec{const_cast<std::byte*>(bytes.data()), bytes.size()};  // which sendmsg(2) only reads
    };
    std::array<iovec, 2> pieces{piece_of(left_header), piece_of(left_body)};
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t count = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (count >= 0) {
        sent_bytes_ += static_cast<std::uint64_t>(count);
        outgoing_done_ += static_cast<std::size_t>(count);
    } else if (!may_try_again(errno)) {
        fail(std::strerror(errno), errno);
    }
}

bool Channel::wait(int other_descriptor, int limit_ms) const noexcept {
    const auto wanted = static_cast<short>(is_sending() ? POLLIN | POLLOUT : POLLIN);
    std::array<pollfd, 2> polled{{{socket_.get(), wanted, 0}, {other_descriptor, POLLIN, 0}}};
    return ::poll(polled.data(), polled.size(), limit_ms) > 0;
}

void Channel::close() noexcept {
    disconnect(socket_);
    socket_ = FileDescriptor();
    outgoing_bytes_ = outgoing_done_ = 0;
}

void Channel::fail(const std::string& why, int error_number) const {
    throw TierIoError(concat(peer_, ": ", why), error_number);
}

}  // namespace torch_offload
