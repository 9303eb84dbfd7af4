// Debug mode: before a collective the processes compare their arguments.
//
// The facts go through the store, not through the group, because mismatched messages on the group
// must be prevented. A missing process is named after the timeout.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <list>
#include <mutex>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/value/to_value.h"
#include "comm/peers.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

Value shape_of(const at::Tensor& leaf) {
  return leaf.is_nested() ? Value("nested") : to_value(leaf.sizes().vec());
}
Value dtype_of(const at::Tensor& leaf) { return Value(dtype_name(leaf.scalar_type())); }
Value device_type_of(const at::Tensor& leaf) {
  return Value(c10::DeviceTypeName(leaf.device().type(), /*lower_case=*/true));
}

/// The compared calls of one group are numbered, so that a call never reads the facts of another.
class CallNumbers {
 public:
  std::int64_t next(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const Entry& entry) { return entry.group.expired(); });
    for (auto& entry : entries_) {
      if (entry.group.lock() == group) return ++entry.last;
    }
    entries_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), 1});
    return 1;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::int64_t last;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

std::int64_t next_call(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  static CallNumbers numbers;
  return numbers.next(group);
}

std::string dotted(std::string_view operation) {
  return str("accelerate.utils.operations.", operation);
}

/// The tensors that cannot take part: "the tensor at ['mask'] is of layout Sparse".
Value problems_of(const Tensors& leaves, const TreeView& view, const DebugFacts& facts) {
  const auto problem_of = facts.problem != nullptr ? facts.problem : &not_dense;
  Value::List problems;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto problem = problem_of(leaves[i]);
    if (!problem.empty()) {
      problems.push_back(Value(str("the tensor", leaf_place(view, i), " is ", problem)));
    }
  }
  return Value(std::move(problems));
}

/// The facts of one process as a dict, so that the report can show each part.
Value input_facts(const Peers& peers, const Tensors& leaves, const TreeView& view,
                  const DebugFacts& facts) {
  const auto of = facts.of != nullptr ? facts.of : &shape_of;
  const auto call = facts.arguments
                        ? str("`", dotted(facts.operation), "` with ", facts.arguments())
                        : str("`", dotted(facts.operation), "`");
  const auto expected = c10::DeviceTypeName(peers.state().device().type(), true);
  return Value(
      Value::Dict{{"call", Value(call)},
                  {"where", Value(str(peers.where().file_name(), ":", peers.where().line()))},
                  {"shapes", view.described(of)},
                  {"dtypes", view.described(&dtype_of)},
                  {"devices", view.described(&device_type_of)},
                  {"device", leaves.empty() ? Value() : device_type_of(leaves.front())},
                  {"problems", problems_of(leaves, view, facts)},
                  {"expected_device", Value(expected)}});
}

using Facts = std::vector<Value>;

/// "\nTitle:\n  - Process 0: ...", one line per process.
template <class F>
std::string block(const char* title, const Facts& all, F&& line) {
  std::string text = str("\n", title, ":");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    text += str("\n  - Process ", rank, ": ", line(all[rank]));
  }
  return text;
}

bool agree(const Facts& all, const char* part) {
  return std::all_of(all.begin(), all.end(),
                     [&](const Value& one) { return one.at(part) == all.front().at(part); });
}

/// The first process that differs from process 0.
int first_astray(const Facts& all, const char* part) {
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].at(part) != all.front().at(part)) return static_cast<int>(rank);
  }
  return -1;
}

std::string call_and_place(const Value& one) {
  if (one.is_none()) return "not here";
  return str(one.at("call").as_string(), " at ", one.at("where").as_string());
}

[[noreturn]] void refuse_calls(const Facts& all) {
  const int rank = first_astray(all, "call");
  throw DistributedOperationException(
      str("rank ", rank, " is in another operation than rank 0, and the processes would wait for ",
          "each other forever. Every process must make the same calls in the same order.\n",
          block("Operations", all, call_and_place)),
      rank);
}

std::string device_block(const Facts& all) {
  return block("Devices", all, [](const Value& one) { return one.at("devices").repr(); });
}

/// The first tensor decides, as in Python.
[[noreturn]] void refuse_device(const Facts& all, const DebugFacts& facts, std::size_t rank) {
  const auto& wanted = all[rank].at("expected_device").as_string();
  throw DistributedOperationException(
      str("Process ", rank, " passes a tensor on ", all[rank].at("device").as_string(), " to `",
          dotted(facts.operation), "`, but its state is configured for ", wanted, ". Move it to ",
          wanted, " before the call.\n", device_block(all)),
      static_cast<int>(rank));
}

/// Tensors that differ in device are sent in different messages, or not at all.
[[noreturn]] void refuse_devices(const Facts& all, const DebugFacts& facts) {
  const int rank = first_astray(all, "devices");
  throw DistributedOperationException(
      str("Cannot apply desired operation due to device mismatches. Move the tensors of rank ",
          rank, " to the devices of rank 0 before the call.\n\nOperation: `",
          dotted(facts.operation), "`", device_block(all)),
      rank);
}

[[noreturn]] void refuse_problems(const Facts& all, const DebugFacts& facts) {
  const auto list = [](const Value& one) {
    std::vector<std::string> problems;
    for (const auto& problem : one.at("problems").as_list())
      problems.push_back(problem.as_string());
    return problems.empty() ? std::string("none") : join(problems);
  };
  const auto rank = std::find_if(all.begin(), all.end(), [](const Value& one) {
    return !one.at("problems").as_list().empty();
  });
  throw DistributedOperationException(
      str("Cannot apply desired operation: some processes pass tensors that cannot be ",
          "used. Pass dense tensors that are not expanded.\n\nOperation: `",
          dotted(facts.operation), "`", block("Tensors that cannot be used", all, list)),
      static_cast<int>(rank - all.begin()));
}

/// Throws unless the facts fit together. Depends on nothing but the facts, which are the same on
/// all processes.
void compare(const Facts& all, const DebugFacts& facts) {
  if (!agree(all, "call")) refuse_calls(all);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto& device = all[rank].at("device");
    if (!device.is_none() && device != all[rank].at("expected_device")) {
      refuse_device(all, facts, rank);
    }
  }
  const bool same_shapes = agree(all, "shapes");
  if (same_shapes && agree(all, "dtypes")) {
    // A problem that all processes share is refused by each of them after this.
    if (!agree(all, "devices")) refuse_devices(all, facts);
    if (!agree(all, "problems")) refuse_problems(all, facts);
    return;
  }
  const auto shapes =
      block("Input shapes", all, [](const Value& one) { return one.at("shapes").repr(); });
  const auto dtypes =
      block("Input dtypes", all, [](const Value& one) { return one.at("dtypes").repr(); });
  throw DistributedOperationException(
      str("Cannot apply desired operation due to ", same_shapes ? "dtype" : "shape",
          " mismatches. All ", same_shapes ? "dtypes" : "shapes",
          " across devices must be valid.\n\nOperation: `", dotted(facts.operation), "`", shapes,
          agree(all, "dtypes") ? "" : dtypes),
      first_astray(all, same_shapes ? "dtypes" : "shapes"));
}

std::vector<std::uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

class Board {
 public:
  Board(const Peers& peers, c10::intrusive_ptr<c10d::Store> store)
      : peers_(peers), store_(std::move(store)), call_(next_call(peers.group())) {}

  Facts exchange(const Value& mine, const DebugFacts& facts) const {
    peers_.guarded([&] { store_->set(key(call_, peers_.rank()), to_bytes(encode_object(mine))); });
    std::vector<std::string> keys;
    for (int rank = 0; rank < peers_.size(); ++rank) keys.push_back(key(call_, rank));
    try {
      store_->wait(keys, peers_.state().timeout());
    } catch (const c10::Error& error) {
      refuse_missing(keys, facts);
      throw CommError(str(peers_.call_site(), ": every process came, but the store failed on rank ",
                          peers_.rank(), ": ", error.what_without_backtrace()));
    }
    Facts all;
    for (const auto& name : keys) all.push_back(read(name));
    // Every process that is here has read the facts of two calls ago.
    if (call_ > 2) {
      peers_.guarded([&] { store_->deleteKey(key(call_ - 2, peers_.rank())); });
    }
    return all;
  }

 private:
  [[nodiscard]] std::string key(std::int64_t call, int rank) const {
    return str("accelerate/debug/", peers_.group()->getGroupName(), "/", call, "/", rank);
  }

  /// Throws unless every process came.
  void refuse_missing(const std::vector<std::string>& keys, const DebugFacts& facts) const {
    std::vector<int> missing;
    Facts all;
    for (int rank = 0; rank < peers_.size(); ++rank) {
      const auto& name = keys[static_cast<std::size_t>(rank)];
      bool here = false;
      peers_.guarded([&] { here = store_->check({name}); });
      all.push_back(here ? read(name) : Value());
      if (!here) missing.push_back(rank);
    }
    if (missing.empty()) return;
    throw DistributedOperationException(
        str(missing.size() == 1 ? "process " : "processes ", join(missing), " did not reach `",
            dotted(facts.operation), "` #", call_, " within ",
            std::chrono::duration_cast<std::chrono::seconds>(peers_.state().timeout()).count(),
            " seconds: rank ", join(missing, ", rank "), " took another branch, or has ended.\n",
            block("Operations", all, call_and_place)),
        missing.front());
  }

  [[nodiscard]] Value read(const std::string& name) const {
    std::vector<std::uint8_t> bytes;
    peers_.guarded([&] { bytes = store_->get(name); });
    return decode_object<Value>(
        std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }

  const Peers& peers_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::int64_t call_;
};

/// Groups may share a store: the name of the group is part of each key.
c10::intrusive_ptr<c10d::Store> store_of(const Peers& peers) {
  if (peers.group() == peers.state().process_group()) return peers.state().store();
  return peers.group()->getStore();
}

}  // namespace

void verify(const Peers& peers, const Tensors& leaves, const TreeView& view,
            const DebugFacts& facts) {
  if (peers.alone() || !peers.state().debug()) return;
  const Value mine = input_facts(peers, leaves, view, facts);
  if (const auto store = store_of(peers)) {
    return compare(Board(peers, store).exchange(mine, facts), facts);
  }
  // A group that was lent without a store: the message itself has the same size everywhere.
  compare(accelerate::all_gather_object(mine, peers.group(), peers.where()), facts);
}

}  // namespace accelerate::detail::comm
