// Units come before operators use them, and go.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <ranges>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "parallel/own_backward.h"
#include "sharding/sharded_state.h"

namespace accelerate::detail::sharding {
namespace {

using Kind = TapeEvent::Kind;

// A gather that the tape does not have.
constexpr std::size_t kUnplanned = std::numeric_limits<std::size_t>::max();

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kEvaluation:
      return "evaluation";
    case Phase::kBackward:
      return "backward";
    case Phase::kLocalBackward:
      break;
  }
  return "local backward";
}

bool is_ancestor(const Unit& unit, const Unit& of) {
  return unit.name.empty() || of.name.starts_with(unit.name + ".");
}

}  // namespace

void ShardedState::pin(Unit& unit, FlatSlice& slice, lazy::Access access) {
  const std::scoped_lock lock(mutex);
  const bool writes = access == lazy::Access::kWrite;
  slice.is_written = slice.is_written || writes;
  if (writes && !unit.is_open) {
    throw StateError(str("The parameter '", slice.name(),
                         "' is sharded, so that a change of it would be lost. Change it inside of "
                         "gathered_parameters with a modifier_rank, or by load_state_dict."));
  }
  if (unit.slot == nullptr) bring(unit, slice);
  ring.use(*unit.slot);
  ++unit.pins;
}

void ShardedState::unpin(Unit& unit) noexcept {
  const std::scoped_lock lock(mutex);
  --unit.pins;
}

void ShardedState::bring(Unit& unit, const FlatSlice& slice) {
  const at::NoGradGuard no_grad;
  if (forward_depth == 0 && !in_backward) {
    if (!parallel::own_backward_runs()) {
      throw StateError(str("The parameter '", slice.name(), "' is sharded over ",
                           placement.processes,
                           " processes, and is whole only inside of "
                           "model(...), backward and gathered_parameters. Use it there, on all "
                           "processes."));
    }
    finish_phase();  // a backward goes through the model and does not train it
  }
  make_room_for(unit);
  if (tape != nullptr && tape->is_learned()) {
    if (const auto ordinal = tape->reach(unit.index)) {
      run_until(tape->gather(*ordinal).until);
      discard_before(*ordinal);
      bind(unit, *ordinal);
      return;
    }
  } else if (tape != nullptr) {
    tape->record({.kind = Kind::kGather, .index = unit.index});
  }
  issue(unit, kUnplanned);
  bind(unit, kUnplanned);
}

void ShardedState::gather_alone(Unit& unit) {
  const at::NoGradGuard no_grad;
  if (unit.slot != nullptr) return;
  issue(unit, kUnplanned);
  bind(unit, kUnplanned);
}

void ShardedState::run_until(std::size_t position) {
  while (tape->position() < position) {
    const auto event = tape->take();
    if (event.kind == Kind::kReduce) {
      launch(*flats[event.index]);
    } else {
      issue(*units[event.index], tape->taken_gathers() - 1);
    }
  }
}

void ShardedState::issue(Unit& unit, std::size_t ordinal) {
  if (spec.limit_gathers) wait_for_oldest();
  Arrival arrival{.ordinal = ordinal};
  if (unit.stays && unit.own_slot == nullptr) {
    unit.own_slot = ring.take_temporary(unit.slot_bytes);
  }
  const bool own_is_free =
      unit.own_slot != nullptr && unit.slot == nullptr && unit.arrivals.empty();
  if (own_is_free) arrival.slot = unit.own_slot;
  if (arrival.slot == nullptr && !unit.stays) arrival.slot = ring.take();
  if (arrival.slot == nullptr) arrival.slot = ring.take_temporary(unit.slot_bytes);
  ring.copy(*arrival.slot, [&] {
    for (const auto& flat : unit.flats) {
      if (flat->is_resident) continue;
      flat->sent_version = flat->shard._version();
      // The device casts: the host would do so into memory that is not pinned.
      arrival.sent.push_back(flat->shard
                                 .to(at::TensorOptions(placement.device),
                                     /*non_blocking=*/placement.masters_on_host)
                                 .to(flat->compute_dtype));
      auto work = collectives.all_gather(unit.title(), memory_of(*arrival.slot, *flat),
                                         arrival.sent.back());
      if (placement.device.is_cpu()) {
        arrival.works.push_back(std::move(work));
      } else {
        work->wait();  // the stream of copies, not the host
      }
    }
  });
  auto& stats = collectives.stats;
  stats.full_bytes += static_cast<std::int64_t>(unit.slot_bytes);
  stats.peak_full_bytes = std::max(stats.peak_full_bytes, stats.full_bytes);
  unit.arrivals.push_back(std::move(arrival));
}

/// So that at most one other gather is under way.
void ShardedState::wait_for_oldest() {
  Arrival* oldest = nullptr;
  std::size_t under_way = 0;
  for (const auto& unit : units) {
    for (auto& arrival : unit->arrivals) {
      if (arrival.works.empty()) continue;
      ++under_way;
      if (oldest == nullptr || arrival.ordinal < oldest->ordinal) oldest = &arrival;
    }
  }
  if (under_way < 2) return;
  for (const auto& work : oldest->works) work->wait();
  oldest->works.clear();
  oldest->sent.clear();
}

void ShardedState::bind(Unit& unit, std::size_t ordinal) {
  const auto found = std::ranges::find(unit.arrivals, ordinal, &Arrival::ordinal);
  const auto arrival = std::move(*found);
  unit.arrivals.erase(found);
  for (const auto& work : arrival.works) work->wait();
  unit.slot = arrival.slot;
  for (const auto& flat : unit.flats) {
    if (!flat->is_resident) allow_leaves(*flat, *unit.slot);
  }
}

void ShardedState::drop(Unit& unit) {
  if (unit.slot == nullptr) return;
  for (const auto& flat : unit.flats) {
    if (!flat->is_resident) forbid_leaves(*flat, placement.processes);
  }
  lazy::SlotRing::leave(*unit.slot);
  if (unit.slot != unit.own_slot) ring.give_back(unit.slot);
  unit.slot = nullptr;
  collectives.stats.full_bytes -= static_cast<std::int64_t>(unit.slot_bytes);
}

void ShardedState::discard(const Unit& unit, Arrival& arrival) {
  for (const auto& work : arrival.works) work->wait();
  if (arrival.slot != unit.own_slot) ring.give_back(arrival.slot);
  collectives.stats.full_bytes -= static_cast<std::int64_t>(unit.slot_bytes);
  ++collectives.stats.wasted_gathers;
}

/// What was gathered for uses that did not come.
void ShardedState::discard_before(std::size_t ordinal) {
  for (const auto& unit : units) {
    std::erase_if(unit->arrivals, [&](Arrival& arrival) {
      if (arrival.ordinal >= ordinal) return false;
      discard(*unit, arrival);
      return true;
    });
  }
}

void ShardedState::make_room_for(const Unit& unit) {
  for (const auto& other : units) {
    const bool is_kept = other->stays || other->pins > 0 || other->is_open;
    if (!is_kept && other.get() != &unit && !is_ancestor(*other, unit)) drop(*other);
  }
}

void ShardedState::release_all() {
  for (const auto& unit : units) {
    if (unit->pins == 0 && !unit->is_open) drop(*unit);
  }
}

void ShardedState::drop_stale() {
  if (has_unpublished) publish_all();
  for (const auto& unit : units) {
    const auto is_stale = [](const auto& flat) {
      return !flat->is_resident && flat->shard._version() != flat->sent_version;
    };
    if (std::ranges::any_of(unit->flats, is_stale)) drop(*unit);
  }
  for (const auto* flat : flats) {
    if (!flat->is_resident || flat->shard._version() == flat->sent_version) continue;
    throw StateError(str("The parameters of '", units[flat->unit]->title(),
                         "' were stepped outside of the prepared optimizer, so that the other "
                         "processes have not got them. Call step() of what prepare returned."));
  }
}

// ---- phases -------------------------------------------------------------------------------------

void ShardedState::begin(Phase wanted, int number) {
  finish_phase();
  const bool forward = wanted == Phase::kForward || wanted == Phase::kEvaluation;
  const auto ahead = forward ? spec.forward_prefetch : spec.backward_prefetch;
  const auto [found, is_new] = tapes.try_emplace(
      std::pair(wanted, number), Tape(ahead, !forward && spec.prefetch_after_gradients));
  tape = &found->second;
  phase = wanted;
  if (is_new && !has_lazy_units) {
    // Without gathers the order is known: from the last buffer to the first, as gradients come.
    for (const auto* flat : std::views::reverse(flats)) {
      if (forward || !reduces || !flat->is_trained) continue;
      tape->record({.kind = Kind::kReduce, .index = flat->index});
    }
    tape->learn();
  }
  tape->begin();
  const at::NoGradGuard no_grad;
  if (tape->is_learned()) run_until(tape->start());
}

void ShardedState::finish_phase() {
  if (tape == nullptr) return;
  const at::NoGradGuard no_grad;
  if (tape->is_learned()) {
    run_until(tape->end());
    discard_before(kUnplanned);
  } else if (!tape->is_given_up() && agree(*tape, phase)) {
    tape->learn();
  }
  tape = nullptr;
}

void ShardedState::finish_forward() {
  const bool evaluates = phase == Phase::kEvaluation;
  finish_phase();
  if (evaluates) release_all();
}

bool ShardedState::agree(const Tape& made, Phase of) {
  const auto hash = static_cast<std::int64_t>(made.hash());
  // The largest hash and the largest complement are those of all processes if all are equal.
  auto both = at::tensor({hash, ~hash}, at::kLong).to(placement.device);
  const auto own = both.clone();
  collectives.all_reduce(str("the order of ", name_of(of)), both, c10d::ReduceOp::MAX);
  if (both.equal(own)) return true;
  warn_once(str("The processes do not gather the units of a sharded model in the same order in ",
                name_of(of), ": nothing is gathered ahead."));
  return false;
}

void ShardedState::publish(const std::vector<Flat*>& of) {
  const at::NoGradGuard no_grad;
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> sent;
  for (auto* flat : of) {
    sent.push_back(flat->shard.to(at::TensorOptions(flat->compute_dtype).device(placement.device)));
    works.push_back(collectives.all_gather(units[flat->unit]->title(), flat->whole, sent.back()));
  }
  for (const auto& work : works) work->wait();
  for (auto* flat : of) flat->sent_version = flat->shard._version();
}

void ShardedState::publish_all() {
  std::vector<Flat*> resident;
  for (auto* flat : flats) {
    if (flat->is_resident) resident.push_back(flat);
  }
  publish(resident);
  has_unpublished = false;
}

}  // namespace accelerate::detail::sharding
