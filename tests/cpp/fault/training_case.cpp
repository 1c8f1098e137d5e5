#include "fault/training_case.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <typeinfo>
#include <utility>

#include "base/check.h"
#include "fault/injector.h"
#include "pager/tier_store.h"
#include "support/pager_fixture.h"
#include "support/three_tiers.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kPages = 10;  // of the only memory, or a device's
constexpr std::size_t kHostPages = 20;
constexpr std::size_t kMostPages = 2;
constexpr std::size_t kTemporaryPages = 2;
constexpr int kTriesToRecover = 4;  // a kept error is raised once, and a late transfer has to end first
constexpr std::chrono::milliseconds kBetweenTries{10};

/// What a process has that nothing may be left of.
struct Holdings {
    static std::size_t count(const char* directory) {
        const std::filesystem::directory_iterator entries(directory);
        return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
    }
    std::size_t descriptors = count("/proc/self/fd");
    std::size_t threads = count("/proc/self/task");
};

/// A step with a temporary in it.
std::size_t step(SmallTraining& training, Pager& pager) {
    const std::span<std::byte> temporary = pager.allocate_range(kTemporaryPages * kPageBytes);
    std::ranges::fill(temporary, std::byte{1});
    pager.free_range(temporary);
    return training.step();
}

bool is_settled(const Segment& segment) {
    for (std::size_t i = 0; i < segment.page_count(); ++i) {
        const PageWord word = segment.page(i).load();
        const bool is_moving = word.state() == PageState::loading || word.state() == PageState::evicting;
        if (is_moving || word.state() == PageState::busy || word.pin_count() != 0) return false;
    }
    return true;
}

/// More than the budget is refused at once. If anything were counted as moving, about to be free or held for a moment
/// that is not, this would wait for it for ever.
void expect_refused(Pager& pager, Report& report) {
    try {
        pager.allocate_range(pager.options().budget_bytes + kPageBytes);
        report.fail(Verdict::stuck, "more memory than the budget was given out");
    } catch (const OutOfTierMemory&) {
    } catch (const std::exception& error) {
        report.fail(Verdict::stuck, concat("more than the budget was refused as: ", error.what()));
    }
}

void expect_empty(Pager& pager, Report& report) {
    const auto is_empty = [&] {
        const ArenaUsage usage = pager.statistics().memory;
        return usage.frame_bytes == 0 && usage.range_bytes == 0 && usage.small_bytes == 0;
    };
    if (comes_true(is_empty)) return;
    const ArenaUsage usage = pager.statistics().memory;
    report.fail(Verdict::stuck, concat("still counted: ", usage.frame_bytes, " bytes of frames, ", usage.range_bytes,
                                       " of temporaries, ", usage.small_bytes, " small"));
}

void expect_nothing_stored(Pager& pager, Report& report) {
    const auto of_nobody = [&] {
        const StoreStatistics store = pager.statistics().store;
        return store.stored_bytes - store.quarantined_bytes;
    };
    if (comes_true([&] { return of_nobody() == 0; })) return;
    report.fail(Verdict::leaked, concat(of_nobody(), " bytes on the SSD are nobody's"));
}

void expect_exact(std::size_t different, const char* when, Report& report) {
    if (different != 0) report.fail(Verdict::wrong, concat(different, " pages are not what was written, ", when));
}

class Trial {
public:
    Trial(const TrainingCase& trained, Report& report) : trained_(trained), report_(report) {}

    void run() {
        if (trained_.begins_with_the_pager) trained_.begin_fault();
        if (make_all()) train_with_fault();
        trained_.end_fault();
        if (!tiers_) make_again("the pager", [&] { make_tiers(); });
        if (tiers_ && !training_) make_again("the training", [&] { make_training(); });
        if (training_ && !report_.has_failed()) goes_on() ? check_training() : check_another();
        end_training();
    }

private:
    void make_tiers() {
        const PagerOptions options = trained_.options ? trained_.options() : small_options();
        tiers_ = std::make_unique<TrainingTiers>(trained_.tiers, options, trained_.make_engine());
    }
    void make_training() {
        training_ = std::make_unique<SmallTraining>(tiers_->top(), trained_.seed, trained_.layers, kMostPages);
    }
    bool make_all() {
        return returns(report_, [&] {
            make_tiers();
            make_training();
        });
    }
    void make_again(const char* what, const std::function<void()>& make) {
        const std::uint64_t raised = report_.raised;
        if (returns(report_, make) || report_.has_failed()) return;
        report_.fail(Verdict::stuck, concat(what, " cannot be made once the fault is over: ", report_.text.data()));
        report_.raised = raised;
    }

    void train_with_fault() {
        if (!trained_.begins_with_the_pager) trained_.begin_fault();
        for (int i = 0; i < trained_.steps && !report_.has_failed(); ++i) {
            returns(report_,
                    [&] { expect_exact(step(*training_, tiers_->top()), "in a step with the fault", report_); });
        }
    }

    bool goes_on() {
        Pager& top = tiers_->top();
        for (int i = 0; i < kTriesToRecover && !report_.has_failed(); ++i) {
            if (i > 0) std::this_thread::sleep_for(kBetweenTries);
            const bool has_gone_on = returns(report_, [&] {
                expect_exact(step(*training_, top), "in the step after the fault", report_);
                top.flush();
                tiers_->host->flush();
            });
            if (has_gone_on) return true;
        }
        return false;
    }

    /// One that has lost bytes is told so for ever; all else that is in the pager goes on.
    void check_another() {
        if (report_.has_failed()) return;
        if (!trained_.may_lose || !report_.has_lost)
            return report_.fail(Verdict::stuck, concat("does not go on after the fault: ", report_.text.data()));
        training_.reset();
        make_again("another training", [&] { make_training(); });
        if (!training_ || !goes_on())
            report_.fail(Verdict::stuck, concat("another training does not go on: ", report_.text.data()));
        if (!report_.has_failed()) check_training();
        if (!report_.has_failed()) report_.verdict = Verdict::lost;
    }

    void check_training() {
        Pager& top = tiers_->top();
        expect_exact(step(*training_, top), "in a later step", report_);
        expect_exact(training_->differences(), "at the end", report_);
        top.flush();
        for (const auto& segment : training_->segments()) {
            if (!comes_true([&] { return is_settled(*segment); })) {
                report_.fail(Verdict::stuck,
                             concat("a page stays pinned or between two states: word ", segment->page(0).load().bits));
            }
        }
        expect_refused(top, report_);
        if (tiers_->above) expect_refused(*tiers_->host, report_);
        expect_exact(training_->differences(), "after all of it had left memory", report_);
    }

    void end_training() {
        training_.reset();
        if (!tiers_) return;
        if (!report_.has_failed()) {
            expect_empty(tiers_->top(), report_);
            expect_empty(*tiers_->host, report_);
            expect_nothing_stored(*tiers_->host, report_);
        }
        tiers_.reset();
    }

    const TrainingCase& trained_;
    Report& report_;
    std::unique_ptr<TrainingTiers> tiers_;
    std::unique_ptr<SmallTraining> training_;
};

}  // namespace

TrainingTiers::TrainingTiers(Tiers tiers, const PagerOptions& options, std::unique_ptr<IoEngine> engine) {
    if (tiers == Tiers::two) {
        host = std::make_unique<Pager>(options, std::move(engine));
        return;
    }
    device = std::make_unique<EmulatedDevice>();
    PagerOptions options_of_host = options;
    options_of_host.device = device.get();
    options_of_host.budget_bytes = kHostPages * kPageBytes;
    host = std::make_unique<Pager>(options_of_host, std::move(engine));
    const PagerOptions options_of_device = ThreeTiers::of_device(kPages, *device, UpdatesOn::host, nullptr);
    above = std::make_unique<Pager>(options_of_device, std::make_unique<TierStore>(*host, *device));
}

PagerOptions small_options() {
    PagerOptions options = options_with(kPages);
    options.transfer_limits.warn_after = std::chrono::milliseconds(10);
    options.transfer_limits.timeout = std::chrono::milliseconds(30);
    return options;
}

bool returns(Report& report, const std::function<void()>& body) {
    try {
        body();
        return true;
    } catch (const LogicError& error) {
        const Spared own;
        report.fail(Verdict::untyped, concat("LogicError: ", error.what()));
    } catch (const OffloadError& error) {
        const Spared own;
        ++report.raised;
        report.has_lost = dynamic_cast<const CorruptPage*>(&error) != nullptr;
        report.note(error.what());
    } catch (const std::bad_alloc&) {
        const Spared own;
        ++report.raised;
        report.note("bad_alloc");
    } catch (const std::exception& error) {
        const Spared own;
        report.fail(Verdict::untyped, concat(typeid(error).name(), ": ", error.what()));
    }
    return false;
}

void train(const TrainingCase& trained, Report& report) {
    const Holdings before;
    Trial(trained, report).run();
    const auto is_as_before = [&] {
        const Holdings now;
        return now.descriptors == before.descriptors && now.threads == before.threads;
    };
    if (report.has_failed() || comes_true(is_as_before)) return;
    const Holdings now;
    report.fail(Verdict::leaked, concat(now.descriptors, " descriptors and ", now.threads, " threads, before ",
                                        before.descriptors, " and ", before.threads));
}

}  // namespace torch_offload::test
