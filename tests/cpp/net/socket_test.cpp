#include "net/socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/check.h"

namespace torch_offload::test {
namespace {

// An address is a host and a port, whatever kind of host, and nothing else.
TEST(NetAddress, IsHostAndPort) {
    EXPECT_EQ(NetAddress::parse("10.0.0.1:7000").text(), "10.0.0.1:7000");
    EXPECT_EQ(NetAddress::parse("[::1]:7000").host, "::1");
    EXPECT_EQ(NetAddress::parse("[::1]:7000").text(), "[::1]:7000");
    EXPECT_EQ(NetAddress::parse("node-3:65535").port, 65535);
    for (const char* wrong : {"", "host", "host:", ":7000", "host:65536", "host:7o", "::1:7000", "[]:1", "host:-1"}) {
        EXPECT_THROW(NetAddress::parse(wrong), InvalidArgument) << wrong;
    }
}

// Who connects to a port where nobody listens is told at once. Method: a port that was free a moment ago.
TEST(Socket, NobodyAnswersIsAnError) {
    const NetAddress loopback{"127.0.0.1", 0};
    std::uint16_t port = 0;
    {
        const FileDescriptor listening = listen_at(loopback);
        port = port_of(listening);
        EXPECT_TRUE(connect_to({"127.0.0.1", port}, std::chrono::seconds(1)));
        EXPECT_THROW(listen_at({"127.0.0.1", port}), TierIoError);
    }
    EXPECT_THROW(connect_to({"127.0.0.1", port}, std::chrono::seconds(1)), TierIoError);
}

// A peer that is there and takes nothing, because somebody has stopped it, stays connected for as long as that takes.
// Method: the system's limit for bytes that a peer has no room for, which would end the connection though it answers.
TEST(Socket, PeerThatIsStoppedStaysConnected) {
    const FileDescriptor listening = listen_at({"127.0.0.1", 0});
    const FileDescriptor here = connect_to({"127.0.0.1", port_of(listening)}, std::chrono::seconds(1));
    unsigned limit_ms = 1;
    socklen_t size = sizeof limit_ms;
    ASSERT_EQ(::getsockopt(here.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &size), 0);
    EXPECT_EQ(limit_ms, 0u);
}

}  // namespace
}  // namespace torch_offload::test
