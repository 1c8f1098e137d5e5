// What the harnesses that train have in common: a training in small over two or three tiers, a fault meanwhile, and
// the same checks after it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/emulated_device.h"
#include "fault/case_runner.h"
#include "pager/pager.h"
#include "support/small_training.h"

namespace torch_offload::test {

enum class Tiers : std::uint8_t { two, three };

/// A pager over an engine, or a device's over that.
struct TrainingTiers {
    TrainingTiers(Tiers tiers, const PagerOptions& options, std::unique_ptr<IoEngine> engine);

    std::unique_ptr<EmulatedDevice> device;
    std::unique_ptr<Pager> host;
    std::unique_ptr<Pager> above;  // of three tiers
    Pager& top() { return above ? *above : *host; }
};

struct TrainingCase {
    Tiers tiers = Tiers::two;
    std::uint64_t seed = 1;
    std::function<PagerOptions()> options;  // of the pager above the SSD; default: small_options()
    std::function<std::unique_ptr<IoEngine>()> make_engine;
    std::function<void()> begin_fault;
    std::function<void()> end_fault;
    bool begins_with_the_pager = false;  // the fault: else once the training is made
    bool may_lose = false;               // bytes: a program that is told so overwrites them
    std::size_t layers = 4;
    int steps = 3;  // while it lasts
};

/// Of less memory than the training's state takes.
PagerOptions small_options();

/// Trains while the fault lasts; then ends it and checks that the training goes on and is exact, that nothing is stuck
/// or counted that is not there, and that nothing is left when all is gone. The fault's own counts are the caller's.
void train(const TrainingCase& trained, Report& report);

/// Runs `body`; a typed error is counted in the report, any other is its failure. Whether it returned.
bool returns(Report& report, const std::function<void()>& body);

}  // namespace torch_offload::test
