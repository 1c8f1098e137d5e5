#include "pager/unwritable_pages.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "pager/page_table.h"

namespace torch_offload::test {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

// A page rests longer after each failure, at most five seconds, and others do not rest with it. Method: a clock by
// hand.
TEST(UnwritablePages, RestsGrowAndEnd) {
    UnwritablePages pages;
    Page page;
    Page other;
    std::int64_t now = 0;
    std::int64_t last_rest = 0;
    for (int failure = 0; failure < 10; ++failure) {
        pages.add(page, std::make_exception_ptr(TierIoError("full", 28)), now);
        EXPECT_TRUE(pages.is_resting(page, now));
        EXPECT_FALSE(pages.is_resting(other, now));
        std::int64_t rest = 0;
        while (pages.is_resting(page, now + rest)) rest += kSecond / 100;
        EXPECT_GE(rest, last_rest);
        EXPECT_LE(rest, 5 * kSecond);
        last_rest = rest;
        now += rest;
    }
    EXPECT_EQ(last_rest, 5 * kSecond);
}

// A failure is said once to who asks for what is new, and again after the next one. Method: two pages.
TEST(UnwritablePages, FailuresAreSaidOnce) {
    UnwritablePages pages;
    Page first;
    Page second;
    EXPECT_EQ(pages.unsaid_error(), nullptr);
    for (Page* page : {&first, &second}) pages.add(*page, std::make_exception_ptr(TierIoError("full", 28)), 0);
    EXPECT_NE(pages.unsaid_error(), nullptr);
    EXPECT_EQ(pages.unsaid_error(), nullptr);
    pages.add(second, std::make_exception_ptr(TierIoError("full", 28)), 0);
    EXPECT_NE(pages.error_of([&](const Page& page) { return &page == &second; }), nullptr);
    EXPECT_EQ(pages.unsaid_error(), nullptr);
}

// The error is kept as long as a page waits to be written. Method: two pages, written one after the other.
TEST(UnwritablePages, ErrorGoesWithTheLastPage) {
    UnwritablePages pages;
    Page first;
    Page second;
    const auto any = [](const Page&) { return true; };
    EXPECT_EQ(pages.error_of(any), nullptr);
    pages.add(first, std::make_exception_ptr(TierIoError("full", 28)), 0);
    pages.add(second, std::make_exception_ptr(TierIoError("full", 28)), 0);
    pages.remove(first);
    EXPECT_EQ(pages.error_of([&](const Page& page) { return &page == &first; }), nullptr);
    EXPECT_THROW(std::rethrow_exception(pages.error_of(any)), TierIoError);
    pages.remove(second);
    EXPECT_EQ(pages.error_of(any), nullptr);
    EXPECT_TRUE(pages.empty());
}

}  // namespace
}  // namespace torch_offload::test
