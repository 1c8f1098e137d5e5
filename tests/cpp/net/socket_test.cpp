#include "net/socket.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace torch_offload::test
