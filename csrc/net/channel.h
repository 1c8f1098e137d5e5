// Messages over a socket that never blocks, one at a time in each direction. Layer net: includes base, storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "net/message.h"
#include "net/socket.h"

namespace torch_offload {

/// Bodies go from and to memory of the caller's, which lives until they have: nothing is copied or kept here.
/// Threads: one at a time.
class Channel {
public:
    enum class Arrival : std::uint8_t {
        nothing,  // now; poll(2) tells when there is more
        header,   // of a message with a body: receive_into() says where to, before the next receive()
        message,  // all of it
    };

    /// `peer`: its name in messages.
    Channel(FileDescriptor socket, std::string peer) noexcept : socket_(std::move(socket)), peer_(std::move(peer)) {}
    ~Channel() { disconnect(socket_); }
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    /// Throws: TierIoError, which names the peer, if it has hung up or what comes is no message of this protocol.
    Arrival receive();
    /// Of the message that arrives.
    const MessageHeader& header() const noexcept { return incoming_; }
    /// Pre: a header has arrived, and the place is as large as its body.
    void receive_into(std::span<std::byte> place) noexcept { place_ = place; }

    /// Throws away what has come, of a peer that is not listened to. Throws: TierIoError if it has hung up.
    void discard();

    /// Begins a message; flush() goes on with it. Pre: none is being sent.
    void send(MessageHeader header, std::span<const std::byte> body = {}) noexcept;
    bool is_sending() const noexcept { return left_to_send() > 0; }
    /// Sends what the socket takes now. Throws: TierIoError, which names the peer, if it has hung up.
    void flush();

    /// Sleeps until something may be received or, if there is something, sent, or the other descriptor is readable;
    /// `limit_ms` at most. Returns whether anything came to pass.
    bool wait(int other_descriptor, int limit_ms) const noexcept;

    /// Ends the connection.
    void close() noexcept;
    int file_descriptor() const noexcept { return socket_.get(); }
    const std::string& peer() const noexcept { return peer_; }
    std::uint64_t received_bytes() const noexcept { return received_bytes_; }
    std::uint64_t sent_bytes() const noexcept { return sent_bytes_; }

private:
    std::size_t left_to_send() const noexcept { return outgoing_bytes_ - outgoing_done_; }
    std::size_t receive_some(std::span<std::byte> place);
    void check_header() const;
    [[noreturn]] void fail(const std::string& why, int error_number) const;

    FileDescriptor socket_;
    std::string peer_;
    std::uint64_t received_bytes_ = 0;
    std::uint64_t sent_bytes_ = 0;

    MessageHeader incoming_;
    std::size_t incoming_done_ = 0;  // header and body
    std::span<std::byte> place_;

    MessageHeader outgoing_;
    std::span<const std::byte> outgoing_body_;
    std::size_t outgoing_bytes_ = 0;
    std::size_t outgoing_done_ = 0;
};

}  // namespace torch_offload
