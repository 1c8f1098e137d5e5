#include "net/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/check.h"

namespace torch_offload {
namespace {

constexpr int kWaitingConnections = 128;
// A machine that has lost its power says nothing: so long, and it counts as gone.
constexpr int kIdleSeconds = 10;
constexpr int kProbeSeconds = 5;
constexpr int kProbes = 3;

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const NetAddress& address, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
    if (error != 0) {
        const int number = error == EAI_SYSTEM ? errno : ENOENT;
        throw TierIoError(concat(address.text(), ": the host is not known: ", ::gai_strerror(error)), number);
    }
    return {found, &::freeaddrinfo};
}

/// Messages leave at once, and a peer that is gone is noticed while nothing is on its way. Without TCP_USER_TIMEOUT:
/// with it the system also ends a connection whose peer answers, but is stopped and takes nothing.
void tune(const FileDescriptor& socket) noexcept {
    const auto set = [&](int level, int name, auto value) {
        ::setsockopt(socket.get(), level, name, &value, sizeof value);  // works without, less well
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
    set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

FileDescriptor open_socket(const addrinfo& candidate) {
    return FileDescriptor(
        ::socket(candidate.ai_family, candidate.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, candidate.ai_protocol));
}

/// 0, or why there is no connection.
int connect_one(const FileDescriptor& socket, const addrinfo& candidate, std::chrono::milliseconds limit) {
    if (!socket) return errno;
    if (::connect(socket.get(), candidate.ai_addr, candidate.ai_addrlen) == 0) return 0;
    if (errno != EINPROGRESS) return errno;
    pollfd polled{socket.get(), POLLOUT, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(limit.count()));
    if (ready < 0) return errno;
    if (ready == 0) return ETIMEDOUT;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    return error;
}

NetAddress address_of(const sockaddr_storage& storage) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    ::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), sizeof storage, host.data(), host.size(), port.data(),
                  port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
    NetAddress address{host.data(), 0};
    std::from_chars(port.data(), port.data() + std::strlen(port.data()), address.port);
    return address;
}

}  // namespace

NetAddress NetAddress::parse(std::string_view text) {
    const std::size_t colon = text.rfind(':');
    NetAddress address;
    if (colon != std::string_view::npos) {
        std::string_view host = text.substr(0, colon);
        const std::string_view port = text.substr(colon + 1);
        const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
        if (is_bracketed) host = host.substr(1, host.size() - 2);
        const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
        const bool is_number = error == std::errc() && end == port.data() + port.size();
        const bool is_plain = host.find_first_of(is_bracketed ? "[]" : "[]:") == std::string_view::npos;
        if (is_number && is_plain) address.host = host;
    }
    OFFLOAD_CHECK(!address.host.empty(), InvalidArgument,
                  "expected host:port, such as 10.0.0.1:7000 or [::1]:7000, got ", text);
    return address;
}

std::string NetAddress::text() const {
    const bool is_ipv6 = host.find(':') != std::string::npos;
    return is_ipv6 ? concat('[', host, "]:", port) : concat(host, ':', port);
}

FileDescriptor connect_to(const NetAddress& address, std::chrono::milliseconds limit) {
    const AddressList candidates = resolve(address, 0);
    int error = 0;
    for (const addrinfo* candidate = candidates.get(); candidate; candidate = candidate->ai_next) {
        FileDescriptor socket = open_socket(*candidate);
        error = connect_one(socket, *candidate, limit);
        if (error != 0) continue;
        tune(socket);
        return socket;
    }
    throw TierIoError(concat(address.text(), " does not answer: ", std::strerror(error)), error);
}

FileDescriptor listen_at(const NetAddress& address) {
    const AddressList candidates = resolve(address, AI_PASSIVE);
    int error = 0;
    for (const addrinfo* candidate = candidates.get(); candidate; candidate = candidate->ai_next) {
        FileDescriptor socket = open_socket(*candidate);
        const int on = 1;
        if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        const bool listens = socket && ::bind(socket.get(), candidate->ai_addr, candidate->ai_addrlen) == 0 &&
                             ::listen(socket.get(), kWaitingConnections) == 0;
        if (listens) return socket;
        error = errno;
    }
    throw TierIoError(concat("cannot listen at ", address.text(), ": ", std::strerror(error)), error);
}

std::uint16_t port_of(const FileDescriptor& listening) {
    sockaddr_storage storage{};
    socklen_t size = sizeof storage;
    ::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&storage), &size);
    return address_of(storage).port;
}

std::optional<AcceptedSocket> accept_from(const FileDescriptor& listening) {
    sockaddr_storage storage{};
    socklen_t size = sizeof storage;
    FileDescriptor socket(
        ::accept4(listening.get(), reinterpret_cast<sockaddr*>(&storage), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
        tune(socket);
        return AcceptedSocket{std::move(socket), address_of(storage)};
    }
    const int error = errno;
    if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        throw TierIoError(concat("no room for one more connection: ", std::strerror(error)), error);
    }
    return std::nullopt;  // nobody waits, or who waited is gone
}

void disconnect(const FileDescriptor& socket) noexcept {
    if (socket) ::shutdown(socket.get(), SHUT_RDWR);
}

}  // namespace torch_offload
