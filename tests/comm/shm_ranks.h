// tests/comm/shm_ranks.h - ranks that talk through shared memory, and a guard that counts.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "accelerate/errors.h"
#include "comm/guard.h"
#include "comm/shm_backend.h"
#include "core/text.h"

namespace accelerate {

/// Tells calls apart by what they do, and knows nothing of the other ranks.
class CountingGuard : public detail::comm::CallGuard {
 public:
  [[nodiscard]] detail::comm::Ticket enter(const detail::comm::CallFacts& facts) override {
    const auto text = detail::str(facts.kind, " ", facts.dtype, " ", facts.reduction, " ",
                                  facts.root, " ", detail::join(facts.sizes), " ", facts.content);
    const auto sequence = static_cast<std::uint64_t>(++entered);
    return {sequence, std::hash<std::string>{}(text) | 1U};
  }
  void leave(const detail::comm::Ticket&) noexcept override { ++left; }
  [[noreturn]] void fail(const detail::comm::Ticket&, const std::string& suspicion,
                         int rank) override {
    verdict = true;
    throw CommError(suspicion, rank);
  }
  [[nodiscard]] bool failed() const noexcept override { return verdict; }

  std::atomic<int> entered{0};
  std::atomic<int> left{0};
  std::atomic<bool> verdict{false};
};

/// Small slots, so that small tensors take several rounds.
inline detail::comm::ShmOptions small_chunks() {
  return {.chunk_bytes = 4096,
          .mailbox_bytes = 2048,
          .direct_bytes = 1024,
          .timeout = std::chrono::seconds(30),
          .meeting_timeout = std::chrono::seconds(30)};
}

/// A process of `on_processes` and where it meets the others.
struct ShmRank {
  int rank = std::atoi(std::getenv("RANK"));
  int size = std::atoi(std::getenv("WORLD_SIZE"));
  c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<c10d::FileStore>(std::getenv("ACCELERATE_DEBUG_RDV_FILE"), size);
  std::shared_ptr<CountingGuard> guard = std::make_shared<CountingGuard>();

  [[nodiscard]] c10::intrusive_ptr<detail::comm::ShmBackend> backend(
      const std::string& name = "shm", const detail::comm::ShmOptions& options = small_chunks()) {
    std::string why_not;
    auto made = detail::comm::ShmBackend::try_make(
        c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size, options, guard, why_not);
    if (!made) throw std::runtime_error("no shared memory: " + why_not);
    return made;
  }

  /// Waits, by other means, until all ranks are here.
  void meet(const std::string& where) {
    store->add("meet/" + where, 1);
    while (store->add("meet/" + where, 0) < size) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

/// As bits: also of dtypes that cannot be compared.
inline std::vector<std::uint8_t> bits(const torch::Tensor& tensor) {
  const auto dense = tensor.detach().contiguous().reshape({-1});
  const auto* data = static_cast<const std::uint8_t*>(dense.const_data_ptr());
  return {data, data + dense.nbytes()};
}

}  // namespace accelerate
