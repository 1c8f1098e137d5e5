#include "base/activity_log.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

namespace torch_offload::test {
namespace {

// What is not asked for is not recorded. Method: a log that was never started.
TEST(ActivityLog, OffRecordsNothing) {
    ActivityLog log;
    log.add({ActivityLane::ssd_read, 1, 2, 3});
    EXPECT_FALSE(log.is_on());
    EXPECT_TRUE(log.copy().activities.empty());
    EXPECT_EQ(log.copy().dropped_count, 0u);
    log.start(4);
    EXPECT_TRUE(log.copy().activities.empty());
}

// A full log keeps what came first and counts the rest. Method: five activities for room for three.
TEST(ActivityLog, FullLogCountsWhatItDrops) {
    ActivityLog log;
    log.start(3);
    for (std::uint64_t i = 0; i < 5; ++i) log.add({ActivityLane::ssd_write, 1, 2, i});
    const ActivityRecord record = log.copy();
    ASSERT_EQ(record.activities.size(), 3u);
    for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(record.activities[i].size_bytes, i);
    EXPECT_EQ(record.dropped_count, 2u);
    EXPECT_LE(record.begin_ns, record.end_ns);
}

TEST(ActivityLog, IsStartedOnce) {
    ActivityLog log;
    EXPECT_THROW(log.start(0), InvalidArgument);
    log.start(1);
    EXPECT_THROW(log.start(1), LogicError);
}

// A long label keeps its end. Method: one that fits to the last character, and one that is longer by one.
TEST(ActivityLog, LongLabelsKeepTheirEnd) {
    const std::string fits(Activity::kLabelBytes, 'x');
    EXPECT_EQ(Activity(ActivityLane::update, 0, 0, 0, fits).label(), fits);
    EXPECT_EQ(Activity(ActivityLane::update, 0, 0, 0, "y" + fits).label(), fits);
    EXPECT_EQ(Activity(ActivityLane::update, 0, 0).label(), "");
}

// Threads lose nothing of each other's, and a copy made meanwhile holds whole activities only. Method: four threads add
// while another copies; an activity's fields belong together.
TEST(ActivityLog, ThreadsAddSideBySide) {
    constexpr std::uint64_t kThreads = 4;
    constexpr std::int64_t kEach = 5000;
    ActivityLog log;
    log.start(kThreads * kEach - 7);
    std::vector<std::jthread> threads;
    for (std::uint64_t thread = 1; thread <= kThreads; ++thread) {
        threads.emplace_back([&log, thread] {
            for (std::int64_t i = 0; i < kEach; ++i) log.add({ActivityLane::update, i, i + 1, thread, "label"});
        });
    }
    for (int round = 0; round < 20; ++round) {
        for (const Activity& activity : log.copy().activities) {
            ASSERT_EQ(activity.end_ns, activity.begin_ns + 1);
            ASSERT_EQ(activity.label(), "label");
        }
    }
    threads.clear();
    const ActivityRecord record = log.copy();
    EXPECT_EQ(record.activities.size(), kThreads * kEach - 7);
    EXPECT_EQ(record.dropped_count, 7u);
    std::map<std::uint64_t, std::uint32_t> thread_ids;
    for (const Activity& activity : record.activities) {
        const auto [known, is_new] = thread_ids.emplace(activity.size_bytes, activity.thread_id);
        ASSERT_EQ(known->second, activity.thread_id);
    }
    EXPECT_EQ(thread_ids.size(), kThreads);
}

}  // namespace
}  // namespace torch_offload::test
