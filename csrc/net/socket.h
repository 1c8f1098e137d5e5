// TCP sockets that never block: how they are addressed, connected and accepted. Layer net: includes base, storage.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "storage/file_descriptor.h"

namespace torch_offload {

/// A host, by name or number, and a port.
struct NetAddress {
    std::string host;
    std::uint16_t port = 0;

    /// Throws: InvalidArgument unless it is host:port, with a number of IPv6 in brackets.
    static NetAddress parse(std::string_view text);
    std::string text() const;
};

/// A connection that somebody else made.
struct AcceptedSocket {
    FileDescriptor socket;
    NetAddress peer;
};

/// Throws: TierIoError, with the system's number, where nobody answers within `limit`.
FileDescriptor connect_to(const NetAddress& address, std::chrono::milliseconds limit);
/// Port 0: one that is free. Throws: TierIoError where the address is not this machine's or the port is taken.
FileDescriptor listen_at(const NetAddress& address);
std::uint16_t port_of(const FileDescriptor& listening);
/// Nothing if nobody waits. Throws: TierIoError where the system has no room for one more.
std::optional<AcceptedSocket> accept_from(const FileDescriptor& listening);
/// Ends the connection for all processes that have the socket.
void disconnect(const FileDescriptor& socket) noexcept;

}  // namespace torch_offload
