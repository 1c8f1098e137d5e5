// The table of what threads do with pages: every pair of goal and word, every order of a few threads and a transfer.
#include "pager/page_steps.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <iostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_offload {
namespace {

/// No test of this program may make a page go where it must not.
class NoIllegalChange : public testing::Environment {
public:
    void TearDown() override { EXPECT_EQ(illegal_changes(), 0u); }
};
[[maybe_unused]] testing::Environment* const no_illegal_change = testing::AddGlobalTestEnvironment(new NoIllegalChange);

constexpr std::array kFlags = {PageWord::kPoisoning, PageWord::kDirty,          PageWord::kWritable, PageWord::kPending,
                               PageWord::kUndefined, PageWord::kTransferFailed, PageWord::kStored};

/// Every word that flags, up to one pin and a state make.
template <typename Body>
void for_each_word(Body body) {
    for (std::uint32_t flags = 0; flags < (1u << kFlags.size()); ++flags) {
        PageWord word;
        for (std::size_t i = 0; i < kFlags.size(); ++i) {
            if ((flags >> i & 1) != 0) word = word.with_flag(kFlags[i]);
        }
        for (std::size_t state = 0; state < kPageStateCount; ++state) {
            const PageWord unpinned = word.with(static_cast<PageState>(state));
            body(unpinned);
            body(unpinned.pinned());
        }
    }
}

// Taking a page is a legal change wherever the table takes one, and loading wherever it loads one; what it marks keeps
// its state; who gives up never begins to wait for memory.
TEST(PageSteps, AreLegalForEveryWord) {
    std::size_t cases = 0;
    for (std::size_t goal_index = 0; goal_index < kPageGoalCount; ++goal_index) {
        const auto goal = static_cast<PageGoal>(goal_index);
        for (const Patience patience : {Patience::wait, Patience::give_up}) {
            for (const bool is_own : {false, true}) {
                for_each_word([&](PageWord word) {
                    ++cases;
                    const PageStep step = next_step(goal, word, patience, is_own);
                    if (step == PageStep::take) {
                        EXPECT_TRUE(is_legal(word.state(), PageState::busy)) << word.bits;
                    }
                    if (step == PageStep::load) {
                        EXPECT_TRUE(is_legal(word.state(), PageState::loading)) << word.bits;
                    }
                    if (step == PageStep::mark) {
                        EXPECT_EQ(marked(goal, word).state(), word.state());
                    }
                    if (step == PageStep::raise) {
                        EXPECT_EQ(word.state(), PageState::failed) << word.bits;
                    }
                    const bool is_update = goal == PageGoal::update;
                    if (is_update && patience == Patience::give_up) {
                        EXPECT_NE(step, PageStep::load) << word.bits;
                    }
                });
            }
        }
    }
    EXPECT_EQ(cases, kPageGoalCount * 2 * 2 * 128 * kPageStateCount * 2);
}

// --- A model ------------------------------------------------------------------------------------------------------

/// What a thread of the model wants: a goal, or to let accesses to a page end on 0xFF bytes.
enum class Wish : std::uint8_t { read, write, overwrite, update, handover, eviction, deferral, poison };
constexpr std::size_t kWishCount = 8;

constexpr PageGoal goal_of(Wish wish) { return static_cast<PageGoal>(wish); }
constexpr bool is_access(Wish wish) { return wish <= Wish::overwrite; }

/// A thread that fulfils its wish once, holds what it has, lets go of it and is done.
struct Actor {
    enum class At : std::uint8_t { begin, inside, holding, ended };
    Wish wish = Wish::read;
    At at = At::begin;
    PageWord before;              // inside: what the page was when this thread took it
    bool is_overwriting = false;  // it has made the page undefined
    bool has_read = false;        // it began a read, or waited for one
    bool is_settling = false;     // it applies deferred work first
    bool is_owner = false;        // holding: the page is busy for it

    PageGoal goal() const { return is_settling ? PageGoal::update : goal_of(wish); }
    bool has_pin() const { return wish <= Wish::handover && at != At::ended; }
};

/// One page and the threads that want it.
struct Model {
    PageWord word;
    std::vector<Actor> actors;

    std::string key() const {
        std::string key(reinterpret_cast<const char*>(&word.bits), sizeof word.bits);
        for (const Actor& actor : actors) {
            key += static_cast<char>(actor.at);
            key.append(reinterpret_cast<const char*>(&actor.before.bits), sizeof actor.before.bits);
            key += static_cast<char>(actor.is_overwriting | actor.has_read << 1 | actor.is_settling << 2 |
                                     actor.is_owner << 3);
        }
        return key;
    }
};

/// Goes through every order of the steps of a model's threads and of the disk, and every way in which each may end.
class Explorer {
public:
    explicit Explorer(Model first) {
        for (const Actor& actor : first.actors) {
            if (actor.has_pin()) first.word = first.word.pinned();
        }
        visit(first);
        while (!waiting_.empty()) {
            const Model model = waiting_.front();
            waiting_.pop_front();
            const std::size_t moves_before = move_count_;
            move_disk(model);
            for (std::size_t i = 0; i < model.actors.size(); ++i) move(model, i);
            check(model, move_count_ > moves_before);
        }
    }
    std::size_t state_count() const { return seen_.size(); }
    std::size_t move_count() const { return move_count_; }

private:
    using At = Actor::At;

    void visit(const Model& model) {
        ++move_count_;
        if (seen_.insert(model.key()).second) waiting_.push_back(model);
    }

    void become(Model& model, PageWord word) {
        EXPECT_TRUE(is_legal(model.word.state(), word.state()))
            << static_cast<int>(model.word.state()) << " to " << static_cast<int>(word.state());
        model.word = word;
    }

    void move_disk(const Model& model) {
        const PageWord word = model.word.without_flag(PageWord::kTransferFailed);
        const auto end = [&](PageWord ended) {
            Model next = model;
            become(next, ended);
            visit(next);
        };
        if (word.state() == PageState::loading) {
            end(word.with(PageState::loaded));
            end(word.with(PageState::stored).with_flag(PageWord::kTransferFailed));
            end(word.with(PageState::failed).without_flag(PageWord::kStored));
        } else if (word.state() == PageState::evicting) {
            end(word.with(PageState::loaded));
            const PageWord written = word.with_flag(PageWord::kStored).without_flag(PageWord::kDirty);
            end(written.with(word.pin_count() != 0 ? PageState::loaded : PageState::stored));
        }
    }

    void move(const Model& model, std::size_t i) {
        switch (model.actors[i].at) {
            case At::begin:
                return model.actors[i].wish == Wish::poison ? begin_poison(model, i) : begin(model, i);
            case At::inside:
                return model.actors[i].wish == Wish::poison ? end_poison(model, i) : move_on(model, i);
            case At::holding:
                return let_go(model, i);
            case At::ended:
                return;
        }
    }

    void begin(Model model, std::size_t i) {
        Actor& actor = model.actors[i];
        const PageWord seen = model.word;
        const PageStep step = next_step(actor.goal(), seen, Patience::wait, actor.is_overwriting);
        switch (step) {
            case PageStep::wait:
                if (seen.state() == PageState::loading && !actor.has_read) {
                    actor.has_read = true;
                    visit(model);
                }
                return;
            case PageStep::settle:
                actor.is_settling = true;
                return visit(model);
            case PageStep::mark:
                model.word = marked(actor.goal(), seen);
                [[fallthrough]];
            case PageStep::finish:
                actor.at = At::holding;
                return visit(model);
            case PageStep::leave:
            case PageStep::raise:
                return end(model, i);
            case PageStep::take:
                actor.at = At::inside;
                actor.before = seen;
                become(model, seen.with(PageState::busy));
                return visit(model);
            case PageStep::load:
                return load(model, i);
        }
    }

    void load(Model model, std::size_t i) {
        Actor& actor = model.actors[i];
        if (actor.has_read && model.word.has(PageWord::kTransferFailed)) return end(model, i);
        actor.has_read = true;
        const PageWord seen = model.word.without_flag(PageWord::kTransferFailed);
        become(model, seen.with(PageState::loading));
        if (actor.goal() == PageGoal::overwrite) {
            actor.is_overwriting = true;
            become(model, seen.with(PageState::loaded).with_flag(PageWord::kUndefined));
        } else if (seen.state() == PageState::zero) {
            become(model, seen.with(PageState::loaded));
        }
        visit(model);
    }

    /// Of a page that the thread took: that it succeeds, and that the system refuses.
    void move_on(const Model& model, std::size_t i) {
        const Actor& actor = model.actors[i];
        const bool was_mapped = actor.before.state() == PageState::mapped;
        const bool is_write = actor.goal() != PageGoal::read;
        const PageWord word = model.word;
        const auto to = [&](PageWord next, At at, bool is_owner = false) {
            Model moved = model;
            become(moved, next);
            moved.actors[i].before = {};
            moved.actors[i].at = at;
            moved.actors[i].is_owner = is_owner;
            visit(moved);
        };
        const auto fail = [&](PageState state) {
            Model failed = model;
            become(failed, word.with(state));
            end(std::move(failed), i);
        };
        constexpr std::uint32_t kWritten = PageWord::kWritable | PageWord::kDirty;
        const PageWord dropped = word.with(word.has(PageWord::kStored) ? PageState::stored : PageState::zero)
                                     .without_flag(PageWord::kWritable);
        if ((is_access(actor.wish) || actor.goal() == PageGoal::update) && was_mapped) {
            to(word.with(PageState::mapped).with_flag(kWritten), At::begin);
            fail(PageState::mapped);
        } else if (is_access(actor.goal())) {
            const bool is_written = is_write && !word.has(PageWord::kUndefined);
            const bool is_writable = is_write || word.has(PageWord::kDirty);
            to(word.with(PageState::mapped)
                   .with_flag((is_written ? PageWord::kDirty : 0) | (is_writable ? PageWord::kWritable : 0)),
               At::begin);
            fail(PageState::loaded);
        } else if (actor.goal() == PageGoal::update) {
            to(word, At::holding, true);
        } else if (actor.goal() == PageGoal::deferral) {
            to(word.with(PageState::loaded).with_flag(PageWord::kPending).without_flag(PageWord::kWritable), At::ended);
            fail(PageState::mapped);
        } else if (!actor.before.is_absent() && word.has(PageWord::kDirty)) {  // eviction or handover
            to(word.with(PageState::evicting).without_flag(PageWord::kWritable | PageWord::kTransferFailed),
               actor.goal() == PageGoal::handover ? At::begin : At::ended);
        } else if (actor.goal() == PageGoal::handover) {
            to(word, At::holding, true);
        } else {
            to(dropped, At::ended);
        }
    }

    void let_go(Model model, std::size_t i) {
        Actor& actor = model.actors[i];
        if (actor.is_settling) {
            if (actor.is_owner) become(model, model.word.with(PageState::loaded).with_flag(PageWord::kDirty));
            model.word = model.word.without_flag(PageWord::kPending);
            actor.is_settling = actor.is_owner = actor.has_read = false;
            actor.at = At::begin;
            return visit(model);
        }
        if (actor.is_overwriting) {
            Model failed = model;
            end(std::move(failed), i);
            become(model, model.word.with(PageState::mapped).with_flag(PageWord::kDirty));
            model.word = model.word.without_flag(PageWord::kUndefined);
            actor.is_overwriting = false;
        }
        if (actor.is_owner) {
            const bool is_update = actor.wish == Wish::update;
            const PageWord word = model.word.without_flag(PageWord::kPending);
            become(model, is_update ? word.with(PageState::loaded).with_flag(PageWord::kDirty)
                                    : word.with(PageState::stored).with_flag(PageWord::kStored));
        }
        end(std::move(model), i);
    }

    /// The thread has what it wanted, or an error: its pin goes, and what it meant to overwrite is as before.
    void end(Model model, std::size_t i) {
        Actor& actor = model.actors[i];
        if (actor.is_overwriting) {
            become(model, model.word.with(PageState::busy));
            become(model, model.word.with(model.word.has(PageWord::kStored) ? PageState::stored : PageState::zero)
                              .without_flag(PageWord::kUndefined | PageWord::kWritable));
        }
        if (actor.has_pin()) model.word = model.word.unpinned();
        actor = {.wish = actor.wish,
                 .at = At::ended,
                 .before = {},
                 .is_overwriting = false,
                 .has_read = false,
                 .is_settling = false,
                 .is_owner = false};
        visit(model);
    }

    void begin_poison(Model model, std::size_t i) {
        if (model.word.state() == PageState::busy) return;
        if (model.word.state() == PageState::mapped) return end(model, i);
        model.word = model.word.with_flag(PageWord::kPoisoning);
        model.actors[i].at = At::inside;
        visit(model);
    }

    void end_poison(Model model, std::size_t i) {
        model.word = model.word.without_flag(PageWord::kPoisoning);
        end(std::move(model), i);
    }

    void check(const Model& model, bool can_move) {
        std::size_t owners = 0;
        std::size_t overwriting = 0;
        bool are_ended = true;
        bool is_held = false;
        for (const Actor& actor : model.actors) {
            const bool is_inside = actor.at == At::inside && actor.wish != Wish::poison;
            const bool is_owner = is_inside || (actor.at == At::holding && actor.is_owner);
            owners += is_owner ? 1 : 0;
            EXPECT_FALSE(is_owner && model.word.has(PageWord::kUndefined) && !actor.is_overwriting)
                << "a page without bytes is the one's that will overwrite it";
            overwriting += actor.is_overwriting ? 1 : 0;
            are_ended = are_ended && actor.at == At::ended;
            is_held = is_held || (actor.at == At::holding && is_access(actor.wish) && !actor.is_settling);
        }
        const PageWord word = model.word;
        const PageState state = word.state();
        EXPECT_EQ(owners, state == PageState::busy ? 1u : 0u) << "a busy page has one owner";
        EXPECT_LE(overwriting, 1u);
        EXPECT_EQ(word.has(PageWord::kUndefined), overwriting == 1);
        EXPECT_FALSE(state == PageState::mapped && word.has(PageWord::kPending));
        EXPECT_FALSE(state == PageState::mapped && word.has(PageWord::kPoisoning));
        EXPECT_FALSE(word.has(PageWord::kUndefined) && state == PageState::evicting);
        if (is_held) {
            EXPECT_TRUE(state == PageState::mapped || state == PageState::busy) << static_cast<int>(state);
        }
        EXPECT_TRUE(can_move || are_ended) << "threads that wait for each other";
        if (are_ended) {
            EXPECT_EQ(word.pin_count(), 0u);
            EXPECT_FALSE(word.has(PageWord::kUndefined | PageWord::kPoisoning));
        }
    }

    std::set<std::string> seen_;
    std::deque<Model> waiting_;
    std::size_t move_count_ = 0;
};

// Four threads with any wishes, on a page in any state of rest: in every order of their steps, and however each ends,
// changes are legal, a busy page has one owner, a page that is held stays, nobody sees bytes that are not there, and
// nobody waits for ever.
TEST(PageSteps, AreSoundInEveryOrder) {
    using enum PageState;
    const auto word_of = [](PageState state, std::uint32_t flags) { return PageWord{flags}.with(state); };
    const std::vector<PageWord> first_words = {
        word_of(zero, 0),
        word_of(zero, PageWord::kPending),
        word_of(stored, PageWord::kStored),
        word_of(stored, PageWord::kStored | PageWord::kPending),
        word_of(loaded, PageWord::kDirty),
        word_of(loaded, PageWord::kStored | PageWord::kDirty | PageWord::kPending),
        word_of(mapped, PageWord::kStored),
        word_of(mapped, PageWord::kWritable | PageWord::kDirty),
        word_of(failed, 0),
    };
    std::size_t states = 0;
    std::size_t moves = 0;
    std::size_t models = 0;
    for (const PageWord word : first_words) {
        for (std::size_t a = 0; a < kWishCount; ++a) {
            for (std::size_t b = a; b < kWishCount; ++b) {
                for (std::size_t c = b; c < kWishCount; ++c) {
                    for (std::size_t d = c; d < kWishCount; ++d) {
                        Model model{word, std::vector<Actor>(4)};
                        std::size_t i = 0;
                        for (const std::size_t wish : {a, b, c, d}) model.actors[i++].wish = static_cast<Wish>(wish);
                        const Explorer explorer(model);
                        states += explorer.state_count();
                        moves += explorer.move_count();
                        ++models;
                        ASSERT_FALSE(HasFailure())
                            << "word " << word.bits << ", wishes " << a << ' ' << b << ' ' << c << ' ' << d;
                    }
                }
            }
        }
    }
    std::cout << models << " models, " << states << " states, " << moves << " moves between them\n";
    RecordProperty("models", std::to_string(models));
    RecordProperty("states", std::to_string(states));
    RecordProperty("moves", std::to_string(moves));
    EXPECT_EQ(models, first_words.size() * 330);
}

}  // namespace
}  // namespace torch_offload
